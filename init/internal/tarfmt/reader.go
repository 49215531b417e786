package tarfmt

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"io"
	"slices"
	"strconv"
	"strings"
)

// Reader reads an archive. It holds one header and one buffer, whatever the archive says; after an error it stays failed.
type Reader struct {
	r      io.Reader
	buf    []byte
	start  int // of what was not consumed, in buf
	hashed int // how far buf is in the digest; at most start
	read   int64
	sum    hash.Hash
	plain  bool  // no records stand before the current header, and nothing behind it was read
	data   int64 // of the current member, not consumed
	pad    int64
	err    error
}

// NewReader makes a Reader.
func NewReader(r io.Reader) *Reader {
	return &Reader{r: r, buf: make([]byte, 0, bufferSize), sum: sha256.New()}
}

// Consumed is how many bytes of the archive were read and used.
func (r *Reader) Consumed() int64 { return r.read - int64(len(r.buf)-r.start) }

// SumBefore is the digest, in hex, of all bytes before the header of the current member, before its data is read. It is "" where records stand
// before that header: the index, for which this is made, has none.
func (r *Reader) SumBefore() string {
	if !r.plain {
		return ""
	}
	return hex.EncodeToString(r.sum.Sum(nil)) // the digest lags behind: the header is not in it yet
}

// fill makes at least n bytes available behind start; n is at most a buffer.
func (r *Reader) fill(n int) error {
	for len(r.buf)-r.start < n {
		if cap(r.buf)-r.start < n || r.start == len(r.buf) {
			r.hashTo(r.start)
			rest := copy(r.buf[:cap(r.buf)], r.buf[r.start:])
			r.buf, r.start, r.hashed = r.buf[:rest], 0, 0
		}
		got, err := r.r.Read(r.buf[len(r.buf):cap(r.buf)])
		r.buf = r.buf[:len(r.buf)+got]
		r.read += int64(got)
		if err == io.EOF && len(r.buf)-r.start < n {
			return io.EOF
		}
		if err != nil && err != io.EOF {
			return err
		}
	}
	return nil
}

func (r *Reader) hashTo(end int) {
	if end > r.hashed {
		r.sum.Write(r.buf[r.hashed:end])
		r.hashed = end
	}
}

// take consumes up to n bytes that are in memory, at least one; they are valid until the next call.
func (r *Reader) take(n int64) ([]byte, error) {
	if err := r.fill(1); err != nil {
		return nil, truncated(err)
	}
	b := r.buf[r.start:min(int64(len(r.buf)), int64(r.start)+n)]
	r.start += len(b)
	return b, nil
}

func truncated(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return invalid("it ends in the middle: the transfer was cut or the file is damaged")
	}
	return err
}

// block consumes one block.
func (r *Reader) block() (*[block]byte, error) {
	if err := r.fill(block); err != nil {
		return nil, truncated(err)
	}
	b := (*[block]byte)(r.buf[r.start:])
	r.start += block
	return b, nil
}

// skipPadding consumes the zeros behind a member.
func (r *Reader) skipPadding() error {
	for r.pad > 0 {
		b, err := r.take(r.pad)
		if err != nil {
			return err
		}
		r.pad -= int64(len(b))
		if !isZero(b) {
			return invalid("padding is not zero")
		}
	}
	return nil
}

func isZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// Next goes on to the next member; data of the current one that was not read is an error. io.EOF is the regular end of the archive.
func (r *Reader) Next() (*Header, error) {
	if r.err != nil {
		return nil, r.err
	}
	h, err := r.next()
	if err != nil {
		r.err = err
		return nil, err
	}
	return h, nil
}

func (r *Reader) next() (*Header, error) {
	if r.data > 0 {
		return nil, invalid("%d bytes of a member were not read", r.data)
	}
	if err := r.skipPadding(); err != nil {
		return nil, err
	}
	r.hashTo(r.start)
	r.plain = true
	b, err := r.block()
	if err != nil {
		return nil, err
	}
	if isZero(b[:]) {
		return nil, r.end()
	}
	head, err := parseBlock(b)
	if err != nil {
		return nil, err
	}
	records := map[string]string{}
	if head.kind == extended {
		r.plain = false
		if records, err = r.records(head.size); err != nil {
			return nil, err
		}
		if b, err = r.block(); err != nil {
			return nil, err
		}
		if head, err = parseBlock(b); err != nil {
			return nil, err
		}
	}
	return r.header(head, records)
}

// end checks that nothing but a second block of zeros follows.
func (r *Reader) end() error {
	b, err := r.block()
	if err != nil {
		return err
	}
	if !isZero(b[:]) {
		return invalid("one block of zeros stands in the middle")
	}
	if err := r.fill(1); err != io.EOF {
		if err == nil {
			err = invalid("bytes follow the end")
		}
		return err
	}
	return io.EOF
}

// fixed is what is in the fixed header.
type fixed struct {
	name, link string
	kind       Type
	mode, size int64
	seconds    int64
}

func parseBlock(b *[block]byte) (fixed, error) {
	var f fixed
	if string(b[257:265]) != "ustar\x0000" {
		return f, invalid("a header is no ustar header")
	}
	sum, err := parseOctal(b[148:156])
	if err != nil || sum != checksum(b) {
		return f, invalid("the checksum of a header is wrong")
	}
	f.name, f.link, f.kind = text(b[0:100]), text(b[157:257]), Type(b[156])
	if b[345] != 0 {
		return f, invalid("%s has a name prefix", quote(f.name))
	}
	for _, field := range []struct {
		to   *int64
		from []byte
	}{{&f.mode, b[100:108]}, {&f.size, b[124:136]}, {&f.seconds, b[136:148]}} {
		if *field.to, err = parseOctal(field.from); err != nil {
			return f, invalid("%s has a number that is not octal", quote(f.name))
		}
	}
	if f.mode > 0o7777 {
		return f, invalid("%s has mode %o", quote(f.name), f.mode)
	}
	return f, nil
}

func text(field []byte) string {
	if i := bytes.IndexByte(field, 0); i >= 0 {
		field = field[:i]
	}
	return string(field)
}

// parseOctal reads digits that end in a NUL or a space.
func parseOctal(field []byte) (int64, error) {
	digits := strings.TrimRight(string(field), "\x00 ")
	n, err := strconv.ParseUint(digits, 8, 63)
	return int64(n), err
}

// parseNumber reads a decimal number as the writer writes it: no sign, no leading zeros.
func parseNumber(s string) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && (s == "0" || (s[0] >= '1' && s[0] <= '9'))
}

// records reads the extended records of a member.
func (r *Reader) records(size int64) (map[string]string, error) {
	if size == 0 || size > MaxHeader {
		return nil, invalid("extended records of %d bytes, 1 to %d are allowed", size, MaxHeader)
	}
	var all bytes.Buffer
	r.pad = padding(size)
	for n := size; n > 0; {
		b, err := r.take(n)
		if err != nil {
			return nil, err
		}
		all.Write(b)
		n -= int64(len(b))
	}
	if err := r.skipPadding(); err != nil {
		return nil, err
	}
	records := map[string]string{}
	for rest := all.String(); rest != ""; {
		digits, _, found := strings.Cut(rest[:min(len(rest), 8)], " ")
		length, ok := parseNumber(digits)
		if !found || !ok || length > int64(len(rest)) || length < int64(len(digits))+4 || rest[length-1] != '\n' {
			return nil, invalid("a damaged extended record")
		}
		key, value, ok := strings.Cut(rest[len(digits)+1:length-1], "=")
		if _, twice := records[key]; !ok || key == "" || twice {
			return nil, invalid("a damaged or repeated extended record %s", quote(key))
		}
		if len(records) == maxRecords {
			return nil, invalid("more than %d extended records", maxRecords)
		}
		records[key] = value
		rest = rest[length:]
	}
	return records, nil
}

// header puts the fixed header and the records together, and reads the map of a sparse file.
func (r *Reader) header(f fixed, records map[string]string) (*Header, error) {
	h := &Header{Name: f.name, Linkname: f.link, Type: f.kind, Mode: uint32(f.mode), Seconds: f.seconds}
	size := f.size
	sparse := map[string]string{}
	for key, value := range records {
		var ok bool
		switch key {
		case keyPath:
			h.Name, ok = value, true
		case keyLinkpath:
			h.Linkname, ok = value, true
		case keySize:
			size, ok = parseNumber(value)
		case keyTime:
			h.Seconds, h.Nanos, ok = parseTime(value)
		case keyCharset:
			ok = value == binaryCharset
		case keyMajor, keyMinor, keySparseName, keyRealSize:
			sparse[key], ok = value, true
		default:
			var name string
			if name, ok = strings.CutPrefix(key, keyXattr); ok {
				name = unescapeKey.Replace(name)
				h.Xattrs = append(h.Xattrs, Xattr{name, value})
				ok = strings.HasPrefix(name, "user.") && strings.IndexByte(name, 0) < 0
			}
		}
		if !ok {
			return nil, invalid("%s has the record %s=%s, which is not allowed", quote(f.name), quote(key), quote(value))
		}
	}
	slices.SortFunc(h.Xattrs, func(a, b Xattr) int { return strings.Compare(a.Name, b.Name) })
	if len(sparse) > 0 {
		realSize, ok := parseNumber(sparse[keyRealSize])
		if len(sparse) != 4 || sparse[keyMajor] != "1" || sparse[keyMinor] != "0" || !ok || f.kind != File || records[keyPath] != "" {
			return nil, invalid("%s is a sparse file of an unknown kind", quote(f.name))
		}
		h.Name, h.Sparse, h.Size = sparse[keySparseName], true, realSize
	}
	if h.Type == Directory {
		h.Name = strings.TrimSuffix(h.Name, "/")
	}
	if err := CheckName(h.Name); err != nil {
		return nil, err
	}
	if err := h.checkKind(size); err != nil {
		return nil, err
	}
	if h.Type != File {
		return h, nil
	}
	r.data, r.pad = size, padding(size)
	if !h.Sparse {
		h.Size = size
		return h, nil
	}
	return h, r.readMap(h)
}

// checkKind checks what depends on the kind of a member.
func (h *Header) checkKind(size int64) error {
	switch h.Type {
	case File, Directory:
		if h.Linkname != "" {
			return invalid("%s has a link target and is no link", quote(h.Name))
		}
	case Symlink:
		if h.Linkname == "" || strings.IndexByte(h.Linkname, 0) >= 0 {
			return invalid("%s is a link to nothing", quote(h.Name))
		}
	case Hardlink:
		if err := CheckName(h.Linkname); err != nil {
			return err
		}
	default:
		return invalid("%s is a device, a pipe or another kind of member (%q) that is not allowed", quote(h.Name), byte(h.Type))
	}
	if h.Type != File && size != 0 {
		return invalid("%s has data and is no file", quote(h.Name))
	}
	if (h.Type == Symlink || h.Type == Hardlink) && len(h.Xattrs) > 0 {
		return invalid("%s is a link with extended attributes", quote(h.Name))
	}
	return nil
}

// parseTime is the opposite of formatTime.
func parseTime(s string) (seconds, nanos int64, ok bool) {
	digits, negative := strings.CutPrefix(s, "-")
	whole, fraction, dot := strings.Cut(digits, ".")
	if whole == "" || len(fraction) > 9 || (dot && fraction == "") {
		return 0, 0, false
	}
	seconds, ok = parseNumber(whole)
	for i := range 9 {
		nanos *= 10
		if i < len(fraction) {
			if fraction[i] < '0' || fraction[i] > '9' {
				return 0, 0, false
			}
			nanos += int64(fraction[i] - '0')
		}
	}
	if negative {
		seconds = -seconds
		if nanos > 0 {
			seconds, nanos = seconds-1, 1e9-nanos
		}
	}
	return seconds, nanos, ok
}

// readMap reads the map of a sparse file: segments in order, apart from each other, within the file, and exactly as long as the data.
func (r *Reader) readMap(h *Header) error {
	bad := func(what string) error { return invalid("%s has a map of holes with %s", quote(h.Name), what) }
	line := make([]byte, 0, 20)
	number := func() (int64, error) {
		line = line[:0]
		for {
			if r.data == 0 {
				return 0, bad("too few lines")
			}
			b, err := r.take(1)
			if err != nil {
				return 0, err
			}
			r.data--
			if b[0] == '\n' {
				break
			}
			if len(line) == cap(line) {
				return 0, bad("a number that is too long")
			}
			line = append(line, b[0])
		}
		if len(line) == 0 {
			return 0, bad("an empty line")
		}
		n, ok := parseNumber(string(line))
		if !ok {
			return 0, bad("something that is no number")
		}
		return n, nil
	}
	begin := r.data
	count, err := number()
	if err != nil {
		return err
	}
	if count > MaxSegments+1 {
		return bad("too many segments")
	}
	end, stored := int64(0), int64(0)
	for range count {
		offset, err := number()
		if err != nil {
			return err
		}
		length, err := number()
		if err != nil {
			return err
		}
		if offset < end || length > h.Size || offset > h.Size-length {
			return bad("segments that overlap or lie outside the file")
		}
		end = offset + length
		stored += length
		if length > 0 {
			h.Segments = append(h.Segments, Segment{offset, length})
		}
	}
	fill := padding(begin - r.data)
	if r.data < fill {
		return bad("no room for its padding")
	}
	data := r.data - fill
	whole := r.pad
	r.pad = fill
	if err := r.skipPadding(); err != nil {
		return err
	}
	r.data, r.pad = data, whole
	if stored != data {
		return bad("another number of bytes than its data")
	}
	return nil
}

// Data gives the next n bytes of the member's data to f, in pieces that are valid during the call.
func (r *Reader) Data(n int64, f func(b []byte) error) error {
	if r.err == nil && n > r.data {
		r.err = invalid("%d bytes more than a member has", n-r.data)
	}
	r.plain = r.plain && n == 0
	for n > 0 && r.err == nil {
		b, err := r.take(n)
		if err == nil {
			n -= int64(len(b))
			r.data -= int64(len(b))
			err = f(b)
		}
		r.err = err
	}
	return r.err
}
