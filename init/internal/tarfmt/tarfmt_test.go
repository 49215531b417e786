package tarfmt

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// member is a header with its stored data.
type member struct {
	Header
	data string
}

func write(t testing.TB, members []member) []byte {
	t.Helper()
	var out bytes.Buffer
	w := NewWriter(&out)
	for _, m := range members {
		if err := w.WriteHeader(&m.Header); err != nil {
			t.Fatal(err)
		}
		if err := w.Data(int64(len(m.data)), strings.NewReader(m.data).Read); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if w.Written() != int64(out.Len()) {
		t.Fatalf("Written says %d, there are %d", w.Written(), out.Len())
	}
	return out.Bytes()
}

func read(archive io.Reader) (members []member, err error) {
	r := NewReader(archive)
	for {
		h, err := r.Next()
		if err == io.EOF {
			return members, nil
		}
		if err != nil {
			return members, err
		}
		var data strings.Builder
		err = r.Data(h.stored(), func(b []byte) error { data.Write(b); return nil })
		members = append(members, member{*h, data.String()})
		if err != nil {
			return members, err
		}
	}
}

func file(name, data string) member {
	return member{Header{Name: name, Type: File, Mode: 0o644, Size: int64(len(data))}, data}
}

// everything is one member of every kind that the format has.
func everything() []member {
	long := strings.Repeat("a long folder name/", 20) + "file"
	return []member{
		file("plain", "content"), file("empty", ""), file("big", strings.Repeat("0123456789abcdef", 20000)), file(long, "long"), file(strings.Repeat("n", 100), "exactly 100"),
		file(strings.Repeat("m", 101), "101"), file("\xff\xfe raw", "raw name"), file(strings.Repeat("\xe9", 200), "raw and long"), file("new\nline = 12 path=x", "awkward"), file("日本語", "text"),
		{Header{Name: "dir", Type: Directory, Mode: 0o7755, Seconds: 12345, Nanos: 678}, ""},
		{Header{Name: "dir/link", Type: Symlink, Mode: 0o777, Linkname: "../../anywhere/\xff"}, ""},
		{Header{Name: "dir/long link", Type: Symlink, Mode: 0o777, Linkname: strings.Repeat("target/", 50)}, ""},
		{Header{Name: "dir/hard", Type: Hardlink, Mode: 0o644, Linkname: "plain"}, ""},
		{Header{Name: "dir/hard2", Type: Hardlink, Mode: 0o644, Linkname: long}, ""},
		{Header{Name: "old", Type: File, Seconds: -2, Nanos: 500_000_000}, ""}, {Header{Name: "older", Type: File, Seconds: -1 << 40}, ""}, {Header{Name: "late", Type: File, Seconds: 1 << 40, Nanos: 1}, ""},
		{Header{Name: "attrs", Type: File, Xattrs: []Xattr{{"user.a=b%", "value\x00\n="}, {"user.\xff", ""}}, Nanos: 999_999_999}, ""},
		{Header{Name: "sparse", Type: File, Size: 1 << 40, Sparse: true, Segments: []Segment{{4096, 3}, {1 << 39, 5}}}, "abcdefgh"},
		{Header{Name: "sparse to its end", Type: File, Size: 12, Sparse: true, Segments: []Segment{{8, 4}}}, "abcd"},
		{Header{Name: "only a hole", Type: File, Size: 1 << 33, Sparse: true}, ""}, {Header{Name: long + "2", Type: File, Size: 5, Sparse: true}, ""},
		file("last", "last"),
	}
}

func TestWhatIsWrittenIsReadBack(t *testing.T) {
	want := everything()
	archive := write(t, want)
	for name, r := range map[string]io.Reader{"at once": bytes.NewReader(archive), "in small pieces": &pieces{archive, 37}} {
		got, err := read(r)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for i := range want {
			if i >= len(got) || !reflect.DeepEqual(got[i], want[i]) {
				t.Fatalf("%s: member %d is %+v, written was %+v", name, i, got[i], want[i])
			}
		}
	}
}

// pieces is a reader that gives a few bytes at a time.
type pieces struct {
	b []byte
	n int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.b) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.b[:min(p.n, len(p.b))])
	p.b = p.b[n:]
	return n, nil
}

func TestFilesOverEightGiBHaveTheirSizeInARecord(t *testing.T) {
	const size = 9 << 30
	var out bytes.Buffer
	w := NewWriter(&out)
	if err := w.WriteHeader(&Header{Name: "huge", Type: File, Size: size}); err != nil {
		t.Fatal(err)
	}
	w.flush()
	h, err := NewReader(&out).Next()
	if err != nil || h.Size != size {
		t.Errorf("%+v %v", h, err)
	}
}

func TestTheDigestIsThatOfTheBytesBeforeTheHeader(t *testing.T) {
	var out bytes.Buffer
	w := NewWriter(&out)
	for _, m := range everything()[:5] {
		if err := errors.Join(w.WriteHeader(&m.Header), w.Data(int64(len(m.data)), strings.NewReader(m.data).Read)); err != nil {
			t.Fatal(err)
		}
	}
	sum, header := w.Sum(), w.Written()
	if err := errors.Join(w.WriteFile("index", []byte("index")), w.Close()); err != nil {
		t.Fatal(err)
	}
	if digest := sha256.Sum256(out.Bytes()[:header]); sum != hex.EncodeToString(digest[:]) {
		t.Errorf("Sum is %s, the digest is %x", sum, digest)
	}
	r := NewReader(bytes.NewReader(out.Bytes()))
	for {
		h, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if h.Name == "index" {
			break
		}
		_ = r.Data(h.Size, func([]byte) error { return nil })
	}
	if got := r.SumBefore(); got != sum || r.Consumed() != header+block {
		t.Errorf("SumBefore is %s at %d, the writer said %s at %d", got, r.Consumed()-block, sum, header)
	}
}

func TestTheStandardLibraryReadsIt(t *testing.T) {
	members := everything()
	r := tar.NewReader(bytes.NewReader(write(t, members)))
	for _, m := range members {
		h, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if strings.TrimSuffix(h.Name, "/") != m.Name || byte(h.Typeflag) != byte(m.Type) || h.Size != m.Size || h.Linkname != m.Linkname || h.ModTime.Unix() != m.Seconds || int64(h.ModTime.Nanosecond()) != m.Nanos {
			t.Errorf("%+v was written as %+v", h, m.Header)
		}
		if m.Size < 1<<20 && !m.Sparse {
			if data, err := io.ReadAll(r); err != nil || string(data) != m.data {
				t.Errorf("%q: %v", m.Name, err)
			}
		}
	}
	if _, err := r.Next(); err != io.EOF {
		t.Error(err)
	}
}

const pythonReads = `
import sys, json, tarfile
out = []
with tarfile.open(sys.argv[1], "r:", encoding="utf-8", errors="surrogateescape") as tar:
    for m in tar:
        raw = lambda s: s.encode("utf-8", "surrogateescape").hex()
        data = tar.extractfile(m).read() if m.isreg() and m.size < 1 << 20 else b""
        out.append([raw(m.name), raw(m.linkname), m.type.decode(), m.mode, m.size, data.hex()])
json.dump(out, sys.stdout)
`

func TestPythonReadsIt(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	members := everything()
	path := filepath.Join(t.TempDir(), "a.tar")
	if err := os.WriteFile(path, write(t, members), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(python, "-c", pythonReads, path).Output()
	if err != nil {
		t.Fatal(err)
	}
	var rows [][]any
	if err := json.Unmarshal(out, &rows); err != nil || len(rows) != len(members) {
		t.Fatalf("%d members read, %d written: %v", len(rows), len(members), err)
	}
	for i, m := range members {
		data := m.data
		if m.Sparse {
			data = ""
			if m.Size < 1<<20 {
				whole := make([]byte, m.Size)
				for j, s := range m.Segments {
					copy(whole[s.Offset:], m.data[j:][:s.Length])
				}
				data = string(whole)
			}
		}
		kind := string(rune(m.Type))
		if want := fmt.Sprint([]any{hex.EncodeToString([]byte(m.Name)), hex.EncodeToString([]byte(m.Linkname)), kind, float64(m.Mode), float64(m.Size), hex.EncodeToString([]byte(data))}); fmt.Sprint(rows[i]) != want {
			t.Errorf("%.300s\nread for %.300s", fmt.Sprint(rows[i]), want)
		}
	}
}

func TestGNUTarReadsIt(t *testing.T) {
	program, err := exec.LookPath("tar")
	if err != nil {
		t.Skip("no tar")
	}
	dir := t.TempDir()
	members := []member{file("a b", "x"), file(strings.Repeat("long/", 40)+"f", "y"), {Header{Name: "s", Type: File, Mode: 0o600, Size: 1 << 20, Sparse: true, Segments: []Segment{{65536, 4}}, Seconds: 1000, Nanos: 5}, "data"}}
	if err := os.WriteFile(dir+"/a.tar", write(t, members), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(program, "-C", dir, "-xf", dir+"/a.tar").CombinedOutput(); err != nil || len(out) > 0 {
		t.Fatalf("%v: %s", err, out)
	}
	data, err := os.ReadFile(dir + "/s")
	if err != nil || len(data) != 1<<20 || string(data[65536:65540]) != "data" {
		t.Errorf("the sparse file has %d bytes, %v", len(data), err)
	}
	if data, err := os.ReadFile(filepath.Join(dir, members[1].Name)); err != nil || string(data) != "y" {
		t.Error(err)
	}
}

// patch changes bytes of the first header and mends its checksum.
func patch(archive []byte, change func(b *[block]byte)) []byte {
	archive = bytes.Clone(archive)
	b := (*[block]byte)(archive)
	change(b)
	octal(b[148:155], checksum(b))
	b[155] = ' '
	return archive
}

func withRecords(records string) []byte {
	var out bytes.Buffer
	w := NewWriter(&out)
	w.writeBlock("@PaxHeader", "", extended, 0o644, int64(len(records)), 0)
	w.write([]byte(records))
	w.pad(padding(int64(len(records))))
	w.writeBlock("f", "", File, 0o644, 0, 0)
	_ = w.Close()
	return out.Bytes()
}

func record(key, value string) string { return string(appendRecord(nil, key, value)) }

func sparseWith(size string, stored string) []byte {
	var out bytes.Buffer
	w := NewWriter(&out)
	records := []byte(record(keyMajor, "1") + record(keyMinor, "0") + record(keySparseName, "s") + record(keyRealSize, size))
	w.writeBlock("@PaxHeader", "", extended, 0o644, int64(len(records)), 0)
	w.write(records)
	w.pad(padding(int64(len(records))))
	w.writeBlock("g/s", "", File, 0o644, int64(len(stored)), 0)
	w.write([]byte(stored))
	w.pad(padding(int64(len(stored))))
	_ = w.Close()
	return out.Bytes()
}

func mapOf(lines string) string { return lines + string(make([]byte, padding(int64(len(lines))))) }

func TestHostileAndDamagedArchivesAreRefused(t *testing.T) {
	good := write(t, []member{file("f", "content"), file("g", "more")})
	named := func(name string) []byte { return write(t, []member{file(name, "x")}) }
	typed := func(kind byte) []byte {
		return patch(write(t, []member{file("f", "")}), func(b *[block]byte) { b[156] = kind })
	}
	link := func(kind Type, target string) []byte {
		return write(t, []member{{Header{Name: "l", Type: kind, Linkname: target}, ""}})
	}
	cases := map[string][]byte{
		"nothing": {}, "zeros only, one block": make([]byte, block), "no end": good[:len(good)-2*block], "half an end": good[:len(good)-block], "cut in data": good[:block+3], "cut in a header": good[:100],
		"bytes behind the end": append(bytes.Clone(good), 0), "a flipped bit": func() []byte { b := bytes.Clone(good); b[3] ^= 1; return b }(),
		"dirty padding": func() []byte { b := bytes.Clone(good); b[block+20] = 1; return b }(),
		"absolute":      named("/etc/passwd"), "dots": named("../x"), "dots inside": named("a/../../x"), "a dot": named("./x"), "two slashes": named("a//x"), "no name": named(""), "a slash at the end of a file": named("x/"),
		"a long part": named(strings.Repeat("x", 256)), "NUL in a name": withRecords(record(keyPath, "a\x00b")), "dots in a record": withRecords(record(keyPath, "a/../../b")),
		"a character device": typed('3'), "a block device": typed('4'), "a FIFO": typed('6'), "a GNU sparse file": typed('S'), "a GNU long name": typed('L'), "a global header": typed('g'), "an old file": typed(0), "contiguous": typed('7'),
		"a hard link out": link(Hardlink, "../x"), "an absolute hard link": link(Hardlink, "/etc/passwd"), "a hard link to nothing": link(Hardlink, ""), "a link to nothing": link(Symlink, ""),
		"a directory with data": patch(write(t, []member{file("f", "x")}), func(b *[block]byte) { b[156] = '5' }),
		"a file with a target":  patch(write(t, []member{file("f", "x")}), func(b *[block]byte) { b[157] = 'x' }),
		"a name prefix":         patch(write(t, []member{file("f", "x")}), func(b *[block]byte) { b[345] = 'x' }),
		"a base-256 size":       patch(write(t, []member{file("f", "x")}), func(b *[block]byte) { b[124] = 0x80 }),
		"a wild mode":           patch(write(t, []member{file("f", "x")}), func(b *[block]byte) { copy(b[100:], "0100644") }),
		"no ustar":              patch(write(t, []member{file("f", "x")}), func(b *[block]byte) { b[257] = 'x' }),
		"an unknown record":     withRecords(record("comment", "x")), "a foreign attribute": withRecords(record(keyXattr+"security.capability", "x")), "a record twice": withRecords(record(keyPath, "a") + record(keyPath, "b")),
		"a record without key": withRecords("5 =x\n"), "a record that is too long": withRecords("99 path=x\n"), "a record that is too short": withRecords("3 a=b\n"), "a record with sign": withRecords("+9 path=x\n"),
		"a record without newline": withRecords("10 path=xx"), "bad time": withRecords(record(keyTime, "1.")), "bad time 2": withRecords(record(keyTime, "1e5")), "bad size": withRecords(record(keySize, "-1")), "size 08": withRecords(record(keySize, "08")), "size -0": withRecords(record(keySize, "-0")),
		"a strange charset": withRecords(record(keyCharset, "x")), "half a sparse header": withRecords(record(keyMajor, "1")), "records and no member": withRecords(record(keyPath, "x"))[:2*block],
		"many records": withRecords(func() (s string) {
			for i := range maxRecords + 1 {
				s += record(keyXattr+"user."+fmt.Sprint(i), "")
			}
			return s
		}()),
		"sparse, overlapping": sparseWith("100", mapOf("2\n0\n5\n3\n5\n")+"0123456789"), "sparse, outside": sparseWith("10", mapOf("1\n8\n5\n")+"01234"), "sparse, overflow": sparseWith("9223372036854775807", mapOf("1\n9223372036854775807\n5\n")+"01234"),
		"sparse, too little data": sparseWith("100", mapOf("1\n0\n5\n")+"0123"), "sparse, too much data": sparseWith("100", mapOf("1\n0\n5\n")+"012345"), "sparse, many": sparseWith("100", mapOf("70000\n")), "sparse, no lines": sparseWith("100", ""),
		"sparse, no number": sparseWith("100", mapOf("x\n")), "sparse, empty line": sparseWith("100", mapOf("\n")), "sparse, long number": sparseWith("100", mapOf("1000000000000000000000000\n")), "sparse, negative": sparseWith("100", mapOf("1\n-1\n5\n")+"01234"),
		"sparse, dirty padding": sparseWith("100", "1\n0\n5\n"+strings.Repeat("x", 506)+"01234"), "sparse, negative size": sparseWith("-1", mapOf("0\n")),
	}
	for name, archive := range cases {
		if members, err := read(bytes.NewReader(archive)); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v %+v", name, err, members)
		}
	}
}

func TestAReadErrorIsPassedOnAsItIs(t *testing.T) {
	broken := errors.New("the channel died")
	good := write(t, []member{file("f", "content")})
	_, err := read(io.MultiReader(bytes.NewReader(good[:600]), errorReader{broken}))
	if !errors.Is(err, broken) || errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
}

type errorReader struct{ err error }

func (e errorReader) Read([]byte) (int, error) { return 0, e.err }

func TestAMemberThatIsShorterThanItsHeaderFailsTheArchive(t *testing.T) {
	w := NewWriter(io.Discard)
	if err := w.WriteHeader(&Header{Name: "f", Type: File, Size: 10}); err != nil {
		t.Fatal(err)
	}
	if err := w.Data(10, strings.NewReader("short").Read); err == nil {
		t.Error("a short file passed")
	}
	if err := w.Close(); err == nil {
		t.Error("the archive was closed all the same")
	}
}

func FuzzReaderNeverPanicsAndAcceptsOnlyWhatTheWriterWrites(f *testing.F) {
	f.Add(write(f, everything()[:2]))
	for _, m := range everything() {
		if len(m.data) < 1000 {
			f.Add(write(f, []member{m}))
		}
	}
	f.Fuzz(func(t *testing.T, archive []byte) {
		members, err := read(bytes.NewReader(archive))
		if err != nil {
			return
		}
		again, err := read(bytes.NewReader(write(t, members)))
		if err != nil || !reflect.DeepEqual(members, again) {
			t.Errorf("%+v became %+v (%v)", members, again, err)
		}
	})
}

func FuzzRoundTrip(f *testing.F) {
	f.Add("name", "target", "user.x", "value", int64(1), int64(5), uint32(0o644), "data")
	f.Fuzz(func(t *testing.T, name, target, xattr, value string, seconds, nanos int64, mode uint32, data string) {
		seconds, nanos = seconds>>16, int64(uint64(nanos)%1e9)
		m := file(name, data)
		m.Mode, m.Seconds, m.Nanos, m.Xattrs = mode&0o7777, seconds, nanos, []Xattr{{"user." + xattr, value}}
		l := member{Header{Name: "link", Type: Symlink, Linkname: target}, ""}
		if CheckName(name) != nil || strings.Contains(target+xattr, "\x00") || target == "" || len(name)+len(target)+len(xattr)*3+len(value) > MaxHeader/2 {
			return
		}
		got, err := read(bytes.NewReader(write(t, []member{m, l})))
		if err != nil || !reflect.DeepEqual(got, []member{m, l}) {
			t.Errorf("%+v became %+v (%v)", []member{m, l}, got, err)
		}
	})
}

func BenchmarkWriteSmallFiles(b *testing.B) {
	w := NewWriter(io.Discard)
	data := make([]byte, 500)
	b.ReportAllocs()
	for b.Loop() {
		_ = w.WriteHeader(&Header{Name: "some/folder/with/a/file", Type: File, Mode: 0o644, Size: 500, Seconds: 1700000000, Nanos: 123456789})
		_ = w.Data(500, func(p []byte) (int, error) { return copy(p, data), nil })
	}
}
