package tarfmt

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"slices"
	"strconv"
	"unicode/utf8"
)

// bufferSize is the piece in which data is read, hashed and written: large enough that calls cost nothing, small for a sandbox of 16 MB.
const bufferSize = 128 << 10

// Writer writes an archive. After an error it stays failed.
type Writer struct {
	w       io.Writer
	buf     []byte
	hashed  int // of buf
	written int64
	sum     hash.Hash
	err     error
	pending int64 // data of the current member that has not come yet
	padding int64
}

// NewWriter makes a Writer.
func NewWriter(w io.Writer) *Writer {
	return &Writer{w: w, buf: make([]byte, 0, bufferSize), sum: sha256.New()}
}

// Written is how many bytes were written or are about to be.
func (w *Writer) Written() int64 { return w.written + int64(len(w.buf)) }

// Sum is the digest, in hex, of all bytes before the next header. The current member must be complete.
func (w *Writer) Sum() string {
	w.endMember()
	w.hash()
	return hex.EncodeToString(w.sum.Sum(nil))
}

func (w *Writer) hash() {
	w.sum.Write(w.buf[w.hashed:])
	w.hashed = len(w.buf)
}

func (w *Writer) flush() {
	w.hash()
	if w.err == nil && len(w.buf) > 0 {
		_, w.err = w.w.Write(w.buf)
	}
	w.written += int64(len(w.buf))
	w.buf, w.hashed = w.buf[:0], 0
}

func (w *Writer) write(b []byte) {
	for len(b) > 0 {
		if len(w.buf) == cap(w.buf) {
			w.flush()
		}
		n := min(len(b), cap(w.buf)-len(w.buf))
		w.buf = append(w.buf, b[:n]...)
		b = b[n:]
	}
}

var zeros [block]byte

func (w *Writer) pad(n int64) { w.write(zeros[:n]) }

func padding(n int64) int64 { return -n & (block - 1) }

// WriteHeader begins a member; its data, as many bytes as the header says, is given to Data. For a sparse file that is the data of its segments.
func (w *Writer) WriteHeader(h *Header) error {
	if w.err == nil && w.pending > 0 {
		w.err = fmt.Errorf("member before %q lacks %d bytes", h.Name, w.pending)
	}
	if w.err != nil {
		return w.err
	}
	w.endMember()
	name := h.Name
	if h.Type == Directory {
		name += "/"
	}
	size := h.stored()
	var records, sparseMap []byte
	charset := func(s string) {
		if records == nil && !utf8.ValidString(s) {
			records = appendRecord(records, keyCharset, binaryCharset)
		}
	}
	charset(name)
	charset(h.Linkname)
	if h.Sparse {
		sparseMap = appendMap(nil, h)
		size += int64(len(sparseMap))
		records = appendRecord(records, keyMajor, "1")
		records = appendRecord(records, keyMinor, "0")
		records = appendRecord(records, keySparseName, name)
		records = appendRecord(records, keyRealSize, strconv.FormatInt(h.Size, 10))
		name = "GNUSparseFile.0/" + strconv.FormatInt(w.Written(), 10) // for readers that know no sparse files; unique
	} else if len(name) > 100 {
		records = appendRecord(records, keyPath, name)
	}
	if len(h.Linkname) > 100 {
		records = appendRecord(records, keyLinkpath, h.Linkname)
	}
	if size > maxOctal {
		records = appendRecord(records, keySize, strconv.FormatInt(size, 10))
	}
	if h.Nanos != 0 || h.Seconds < 0 || h.Seconds > maxOctal {
		records = appendRecord(records, keyTime, formatTime(h.Seconds, h.Nanos))
	}
	for _, x := range h.Xattrs {
		records = appendRecord(records, keyXattr+escapeKey.Replace(x.Name), x.Value)
	}
	if len(records) > MaxHeader || len(h.Xattrs) > maxXattrs {
		return fmt.Errorf("%s has %d extended attributes and needs %d bytes for them and its names, an archive can hold %d and %d", quote(h.Name), len(h.Xattrs), len(records), maxXattrs, MaxHeader)
	}
	if len(records) > 0 {
		w.writeBlock("@PaxHeader", "", extended, 0o644, int64(len(records)), 0)
		w.write(records)
		w.pad(padding(int64(len(records))))
	}
	seconds := h.Seconds
	if seconds < 0 || seconds > maxOctal {
		seconds = 0
	}
	w.writeBlock(name, h.Linkname, h.Type, h.Mode, size, seconds)
	w.write(sparseMap)
	w.pending, w.padding = size-int64(len(sparseMap)), padding(size)
	return w.err
}

func (w *Writer) endMember() {
	w.pad(w.padding)
	w.padding = 0
}

// writeBlock writes the fixed header. Owner is 0 and has no name: who owns the files is no part of an archive.
func (w *Writer) writeBlock(name, link string, kind Type, mode uint32, size, seconds int64) {
	var b [block]byte
	copy(b[0:100], name)
	octal(b[100:108], int64(mode&0o7777))
	octal(b[108:116], 0)
	octal(b[116:124], 0)
	if size > maxOctal {
		size = 0 // the record says it
	}
	octal(b[124:136], size)
	octal(b[136:148], seconds)
	b[156] = byte(kind)
	copy(b[157:257], link)
	copy(b[257:265], "ustar\x0000")
	octal(b[329:337], 0)
	octal(b[337:345], 0)
	sum := checksum(&b)
	octal(b[148:155], sum)
	b[155] = ' '
	w.write(b[:])
}

// octal fills a field with digits and a NUL at its end.
func octal(field []byte, n int64) {
	last := len(field) - 1
	field[last] = 0
	for i := last - 1; i >= 0; i-- {
		field[i] = byte('0' + n&7)
		n >>= 3
	}
}

// checksum counts its own field as spaces.
func checksum(b *[block]byte) int64 {
	sum := int64(8 * ' ')
	for i, c := range b {
		if i < 148 || i >= 156 {
			sum += int64(c)
		}
	}
	return sum
}

// appendRecord adds "length key=value\n"; the length counts its own digits.
func appendRecord(b []byte, key, value string) []byte {
	rest := len(key) + len(value) + 3 // space, "=", newline
	size := rest + len(strconv.Itoa(rest))
	if n := rest + len(strconv.Itoa(size)); n != size {
		size = n
	}
	b = strconv.AppendInt(b, int64(size), 10)
	b = append(b, ' ')
	b = append(b, key...)
	b = append(b, '=')
	b = append(b, value...)
	return append(b, '\n')
}

// formatTime is exact decimal seconds; nanos count upwards also before 1970.
func formatTime(seconds, nanos int64) string {
	sign := ""
	if seconds < 0 {
		sign = "-"
		if nanos > 0 {
			seconds, nanos = seconds+1, 1e9-nanos
		}
		seconds = -seconds
	}
	b := append([]byte(sign), strconv.FormatInt(seconds, 10)...)
	if nanos != 0 {
		digits := strconv.FormatInt(1e9+nanos, 10)[1:]
		for digits[len(digits)-1] == '0' {
			digits = digits[:len(digits)-1]
		}
		b = append(append(b, '.'), digits...)
	}
	return string(b)
}

// appendMap is the map of a sparse file in front of its data: decimal lines, filled up to whole blocks. An empty segment at the end gives the size
// to readers that look at nothing else.
func appendMap(b []byte, h *Header) []byte {
	segments := h.Segments
	if n := len(segments); n == 0 || segments[n-1].Offset+segments[n-1].Length < h.Size {
		segments = append(slices.Clip(segments), Segment{Offset: h.Size})
	}
	line := func(n int64) { b = append(strconv.AppendInt(b, n, 10), '\n') }
	line(int64(len(segments)))
	for _, s := range segments {
		line(s.Offset)
		line(s.Length)
	}
	return append(b, make([]byte, padding(int64(len(b))))...)
}

// Data takes the next n bytes of the member's data from read, which fills what it is given as far as it can; no bytes and no error mean the end.
// io.ErrUnexpectedEOF: there were fewer, and the archive must be given up.
func (w *Writer) Data(n int64, read func(b []byte) (int, error)) error {
	if w.err == nil && n > w.pending {
		w.err = fmt.Errorf("%d bytes more than the header says", n-w.pending)
	}
	for n > 0 && w.err == nil {
		if len(w.buf) == cap(w.buf) {
			w.flush()
			continue
		}
		free := w.buf[len(w.buf):cap(w.buf)]
		got, err := read(free[:min(int64(len(free)), n)])
		if err != nil {
			w.err = err
			break
		}
		if got == 0 {
			w.err = io.ErrUnexpectedEOF
			break
		}
		w.buf = w.buf[:len(w.buf)+got]
		n -= int64(got)
		w.pending -= int64(got)
	}
	return w.err
}

// WriteFile writes a whole member from memory.
func (w *Writer) WriteFile(name string, data []byte) error {
	if err := w.WriteHeader(&Header{Name: name, Type: File, Mode: 0o600, Size: int64(len(data))}); err != nil {
		return err
	}
	w.pending = 0
	w.write(data)
	return w.err
}

// Close writes the end of the archive and everything that is in the buffer.
func (w *Writer) Close() error {
	if w.err == nil && w.pending > 0 {
		w.err = fmt.Errorf("the last member lacks %d bytes", w.pending)
	}
	if w.err != nil {
		return w.err
	}
	w.endMember()
	w.pad(block)
	w.pad(block)
	w.flush()
	return w.err
}
