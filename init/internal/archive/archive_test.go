package archive

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"agentsandbox.dev/init/internal/gate"
	"agentsandbox.dev/init/internal/tarfmt"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

// recorder is a sandbox without processes: it notes what it was asked.
type recorder struct {
	mu     sync.Mutex
	calls  []string
	frozen bool
	thawed chan struct{}
	fail   string // the call that fails
}

func (r *recorder) note(call string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, call)
	if r.fail == call {
		return errors.New(call + " failed")
	}
	return nil
}

func (r *recorder) Freeze(context.Context) (func(), error) {
	if err := r.note("freeze"); err != nil {
		return nil, err
	}
	r.frozen, r.thawed = true, make(chan struct{})
	var once sync.Once
	return func() {
		once.Do(func() {
			_ = r.note("thaw")
			close(r.thawed)
		})
	}, nil
}

func (r *recorder) KillAll(context.Context) error { return r.note("kill") }

func (r *recorder) Reset() string {
	_ = r.note("reset")
	return "new boot id"
}

func (r *recorder) seen() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.calls, " ")
}

// box is a workspace with its handler.
type box struct {
	t         *testing.T
	work, tmp string
	processes *recorder
	gate      *gate.Gate
	handler   *Handler
	mux       *http.ServeMux
}

func newBox(t *testing.T) *box {
	t.Helper()
	dir := t.TempDir()
	b := &box{t: t, work: dir + "/workspace", tmp: dir + "/tmp", processes: &recorder{}, gate: &gate.Gate{}, mux: http.NewServeMux()}
	must(t, errors.Join(os.Mkdir(b.work, 0o755), os.Mkdir(b.tmp, 0o1777)))
	b.handler = New(Config{Workspace: b.work, Tmp: b.tmp}, b.gate, b.processes)
	b.handler.Register(b.mux)
	t.Cleanup(func() { // t.TempDir cannot remove closed folders when it is not root's
		if fd, err := tree.Open(unix.AT_FDCWD, dir, folderFlags, 0); err == nil {
			_ = tree.Empty(fd, nil)
			_ = unix.Close(fd)
		}
	})
	return b
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// asUser runs f without root's permission to do everything, as uid 1000 where files are concerned; the box's folders become that user's.
func (b *box) asUser(f func()) {
	b.t.Helper()
	if os.Getuid() != 0 {
		f()
		return
	}
	for _, dir := range []string{b.work, b.tmp} {
		must(b.t, os.Chown(dir, 1000, 1000))
	}
	must(b.t, errors.Join(os.Chmod(filepath.Dir(b.work), 0o755), os.Chmod(filepath.Dir(filepath.Dir(b.work)), 0o755)))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b.handler.uid = 1000
	must(b.t, errors.Join(unix.Setfsuid(1000), unix.Setfsgid(1000)))
	defer func() { _, _ = unix.Setfsuid(0), unix.Setfsgid(0) }()
	f()
}

// archive takes an archive and returns it whole.
func (b *box) archive() []byte {
	b.t.Helper()
	w := httptest.NewRecorder()
	b.mux.ServeHTTP(w, httptest.NewRequest("POST", "/v1/archive", strings.NewReader(`{"format":1}`)))
	if w.Code != 200 {
		b.t.Fatalf("archive: %d %s", w.Code, w.Body)
	}
	return w.Body.Bytes()
}

// members reads an archive; the last is the index, or the failure.
func members(t *testing.T, archive []byte) (list []tarfmt.Header, last []byte) {
	t.Helper()
	r := tarfmt.NewReader(bytes.NewReader(archive))
	for {
		h, err := r.Next()
		if err == io.EOF {
			return list, last
		}
		must(t, err)
		last = nil
		size := h.Size
		if h.Sparse {
			size = 0
			for _, s := range h.Segments {
				size += s.Length
			}
		}
		if h.Type == tarfmt.File {
			must(t, r.Data(size, func(b []byte) error { last = append(last, b...); return nil }))
		}
		list = append(list, *h)
	}
}

func indexOf(t *testing.T, archive []byte) Index {
	t.Helper()
	list, last := members(t, archive)
	var index Index
	if name := list[len(list)-1].Name; name != indexName {
		t.Fatalf("the last member is %s: %s", name, last)
	}
	must(t, json.Unmarshal(last, &index))
	return index
}

func (b *box) restore(archive []byte, query string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	b.mux.ServeHTTP(w, httptest.NewRequest("POST", "/v1/restore?"+query, bytes.NewReader(archive)))
	return w
}

func (b *box) mustRestore(archive []byte) {
	b.t.Helper()
	index := indexOf(b.t, archive)
	if w := b.restore(archive, fmt.Sprintf("bytes=%d&entries=%d&max_bytes=%d", index.Bytes, index.Entries, len(archive))); w.Code != 200 {
		b.t.Fatalf("restore: %d %s", w.Code, w.Body)
	}
}

const plenty = "bytes=1000000000&entries=1000000&max_bytes=1000000000"

// describe gives the tree as lines, with everything that an archive keeps.
func describe(t testing.TB, dir string) map[string]string {
	t.Helper()
	lines := map[string]string{}
	first := map[uint64]string{}
	must(t, filepath.Walk(dir, func(path string, fi os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		if path == dir {
			return nil
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		name := path[len(dir)+1:]
		line := fmt.Sprintf("%o %d.%09d", st.Mode, st.Mtim.Sec, st.Mtim.Nsec)
		switch {
		case fi.Mode()&os.ModeSymlink != 0:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " > " + target
		case fi.Mode().IsRegular():
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %d %x", st.Size, sha256.Sum256(data))
			if st.Nlink > 1 {
				if _, seen := first[st.Ino]; !seen {
					first[st.Ino] = name
				}
				line += " = " + first[st.Ino]
			}
		}
		if fi.Mode()&os.ModeSymlink == 0 {
			buf := make([]byte, 4096)
			if n, err := unix.Listxattr(path, buf); err == nil {
				for attr := range strings.SplitSeq(string(buf[:n]), "\x00") {
					if strings.HasPrefix(attr, "user.") {
						value := make([]byte, 4096)
						n, _ := unix.Getxattr(path, attr, value)
						line += fmt.Sprintf(" %q=%q", attr, value[:n])
					}
				}
			}
		}
		lines[name] = line
		return nil
	}))
	return lines
}

func same(t testing.TB, what string, want, got map[string]string) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if got[name] != want[name] {
			t.Errorf("%s: %q is %q, not %q", what, name, got[name], want[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if _, expected := want[name]; !expected {
			t.Errorf("%s: %q should not be there", what, name)
		}
	}
}

// build makes a tree with one of everything.
func build(t testing.TB, dir string) {
	t.Helper()
	file := func(name, content string, mode os.FileMode) {
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
		must(t, os.Chmod(filepath.Join(dir, name), mode))
	}
	file("dir/file", "content", 0o644)
	file("script", "#!/bin/sh\n", 0o755)
	file("private", "p", 0o600)
	file("zero", "", 0o644)
	file(".hidden", "h", 0o644)
	file("setuid", "s", 0o755|os.ModeSetuid)
	file("closed file", "c", 0o000)
	file("read-only folder/f", "r", 0o400)
	file("closed folder/deep/f", "d", 0o644)
	file("dir/closed inside/f", "i", 0o000)
	file("no search/f", "n", 0o644)
	file("write only/f", "w", 0o644)
	file(strings.Repeat("a long name/", 30)+"f", "l", 0o644)
	file(strings.Repeat("n", 255), "255", 0o644)
	for _, name := range []string{"a b", "[x]", "-rf", "$(id)", `quo'te"`, "日本語", "é", "e\u0301", "*", "~", `back\slash`, "new\nline", "\xff\xfe", "%2e%2e", "...", "a=b"} {
		file("names/"+name, name, 0o644)
	}
	file("big", strings.Repeat("0123456789abcdef", 100_000), 0o644)
	must(t, os.MkdirAll(dir+"/empty2/nested", 0o755))
	must(t, os.Mkdir(dir+"/empty", 0o755))
	must(t, os.Mkdir(dir+"/sticky", 0o755))
	must(t, os.Chmod(dir+"/sticky", 0o777|os.ModeSticky|os.ModeSetgid))
	for name, target := range map[string]string{"link": "dir/file", "dlink": "dir", "gone": "nowhere", "out": "/etc/passwd", "dir/up": "../../..", "raw link": "\xfe\xff", "long link": strings.Repeat("x/", 1000)} {
		must(t, os.Symlink(target, filepath.Join(dir, name)))
	}
	must(t, os.Link(dir+"/dir/file", dir+"/dir/same"))
	must(t, os.Link(dir+"/dir/file", dir+"/zz same"))
	must(t, os.Link(dir+"/dir/closed inside/f", dir+"/zz closed"))
	must(t, os.Link(dir+"/closed folder/deep/f", dir+"/zz deep"))
	sparse, err := os.Create(dir + "/sparse")
	must(t, err)
	must(t, sparse.Truncate(100<<20))
	_, err = sparse.WriteAt([]byte("in the middle"), 50<<20)
	must(t, err)
	must(t, sparse.Close())
	must(t, os.Link(dir+"/sparse", dir+"/zz sparse"))
	hole, err := os.Create(dir + "/hole")
	must(t, err)
	must(t, hole.Truncate(1<<20))
	must(t, hole.Close())
	_ = unix.Setxattr(dir+"/script", "user.origin", []byte("a\x00b"), 0)
	_ = unix.Setxattr(dir+"/script", "user.x=y%", nil, 0)
	_ = unix.Setxattr(dir+"/empty", "user.folder", []byte("f"), 0)
	when := time.Unix(-3, 250_000_000)
	must(t, os.Chtimes(dir+"/zero", when, when))
	times := []unix.Timespec{{Sec: 1, Nsec: 1}, {Sec: 1_000_000_000, Nsec: 123_456_789}}
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, dir+"/gone", times, unix.AT_SYMLINK_NOFOLLOW))
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, dir+"/dir", times, 0))
	must(t, os.Chmod(dir+"/no search", 0o600))
	must(t, os.Chmod(dir+"/write only", 0o300))
	must(t, os.Chmod(dir+"/dir/closed inside", 0o000))
	must(t, os.Chmod(dir+"/closed folder/deep", 0o500))
	must(t, os.Chmod(dir+"/closed folder", 0o000))
	must(t, os.Chmod(dir+"/read-only folder", 0o500))
}

// spoil replaces what is there by something else.
func spoil(t testing.TB, dir string) {
	t.Helper()
	fd, err := tree.Open(unix.AT_FDCWD, dir, folderFlags, 0)
	must(t, err)
	defer func() { _ = unix.Close(fd) }()
	must(t, tree.Empty(fd, nil))
	must(t, os.MkdirAll(dir+"/other/deep", 0o755))
	must(t, os.WriteFile(dir+"/dir", []byte("a file where a folder was"), 0o644))
	must(t, os.Mkdir(dir+"/script", 0o755))
	must(t, os.WriteFile(dir+"/other/deep/f", nil, 0o000))
	must(t, os.Chmod(dir+"/other/deep", 0o000))
	must(t, os.Chmod(dir+"/other", 0o500))
}

func TestARestoreBringsTheSameTreeEveryTime(t *testing.T) {
	for _, user := range []string{"root", "user"} {
		t.Run(user, func(t *testing.T) {
			b := newBox(t)
			run := func(f func()) { f() }
			if user == "user" {
				run = b.asUser
			}
			var first []byte
			run(func() { build(t, b.work) })
			want := describe(t, b.work)
			for round := range 3 {
				run(func() {
					archive := b.archive()
					if round == 0 {
						first = archive
					} else if !bytes.Equal(archive, first) {
						t.Error("the same tree gave another archive")
					}
					same(t, "after the archive", want, asRoot(func() map[string]string { return describe(t, b.work) }))
					spoil(t, b.work)
					must(t, os.WriteFile(b.tmp+"/left", nil, 0o600))
					b.mustRestore(archive)
				})
				same(t, "after the restore", want, describe(t, b.work))
				if left, _ := os.ReadDir(b.tmp); len(left) > 0 {
					t.Errorf("%v is left in tmp", left)
				}
			}
			var st unix.Stat_t
			must(t, unix.Stat(b.work+"/sparse", &st))
			if st.Blocks*512 > 1<<20 {
				t.Errorf("the holes were filled: %d bytes on disk", st.Blocks*512)
			}
			if calls := b.processes.seen(); !strings.HasPrefix(calls, "freeze thaw freeze kill reset thaw freeze thaw") {
				t.Errorf("calls: %s", calls)
			}
		})
	}
}

// asRoot runs f with root's view in the midst of asUser.
func asRoot[T any](f func() T) T {
	if os.Getuid() != 0 {
		return f()
	}
	uid, _ := unix.SetfsuidRetUid(0)
	defer func() { _ = unix.Setfsuid(uid) }()
	return f()
}

func TestTheIndexCountsWhatIsThereAndSpecialFilesAreSkipped(t *testing.T) {
	b := newBox(t)
	must(t, os.WriteFile(b.work+"/f", []byte("12345"), 0o644))
	must(t, os.Link(b.work+"/f", b.work+"/g"))
	must(t, os.Symlink("f", b.work+"/l"))
	must(t, os.Mkdir(b.work+"/d", 0o755))
	must(t, unix.Mkfifo(b.work+"/d/fifo", 0o644))
	listener, err := net.Listen("unix", b.work+"/socket")
	must(t, err)
	defer func() { _ = listener.Close() }()
	must(t, os.Mkdir(b.work+"/"+tree.Reserved, 0o755))
	must(t, os.WriteFile(b.work+"/"+tree.Reserved+"/x", nil, 0o644))
	must(t, os.Mkdir(b.work+"/"+tree.LostFound, 0o700))
	must(t, os.WriteFile(b.work+"/d/"+tree.TemporaryName([16]byte{}), nil, 0o600))
	archive := b.archive()
	index := indexOf(t, archive)
	if index.SHA256 = ""; index != (Index{Format: 1, Files: 1, Directories: 1, Symlinks: 1, Hardlinks: 1, Skipped: 2, Bytes: 5, Entries: 4}) {
		t.Errorf("%+v", index)
	}
	var names []string
	list, _ := members(t, archive)
	for _, h := range list {
		names = append(names, h.Name)
	}
	if fmt.Sprint(names) != "["+manifestName+" d f g l "+indexName+"]" {
		t.Errorf("%q", names)
	}
}

const pythonManifest = `
import sys, tarfile, hashlib, json
out = {}
with tarfile.open(sys.argv[1], "r:", encoding="utf-8", errors="surrogateescape") as tar:
    for m in tar:
        data = tar.extractfile(m).read() if m.isreg() else b""
        out[m.name.encode("utf-8", "surrogateescape").hex()] = [m.type.decode(), m.mode, m.size, hashlib.sha256(data).hexdigest() if m.isreg() else m.linkname.encode("utf-8", "surrogateescape").hex()]
json.dump(out, sys.stdout)
`

func TestPythonReadsAWholeWorkspace(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	b := newBox(t)
	build(t, b.work)
	archive := b.archive()
	must(t, os.WriteFile(b.tmp+"/a.tar", archive, 0o600))
	out, err := exec.Command(python, "-c", pythonManifest, b.tmp+"/a.tar").Output()
	must(t, err)
	var got map[string][]any
	must(t, json.Unmarshal(out, &got))
	index := indexOf(t, archive)
	if len(got) != int(index.Entries)+2 {
		t.Errorf("%d members, the index counts %d", len(got), index.Entries)
	}
	count := 0
	must(t, filepath.Walk(b.work, func(path string, fi os.FileInfo, err error) error {
		if path == b.work || err != nil {
			return err
		}
		count++
		member := got[fmt.Sprintf("%x", path[len(b.work)+1:])]
		var st unix.Stat_t
		must(t, unix.Lstat(path, &st))
		if member == nil || int(member[1].(float64)) != int(st.Mode&0o7777) {
			t.Errorf("%q: %v", path, member)
			return nil
		}
		if member[0] == "0" {
			data, err := os.ReadFile(path)
			must(t, err)
			if member[3] != fmt.Sprintf("%x", sha256.Sum256(data)) {
				t.Errorf("%q has other bytes", path)
			}
		}
		return nil
	}))
	if count != int(index.Entries) {
		t.Errorf("%d entries in the tree, %d in the index", count, index.Entries)
	}
}

func TestAFileOfAnotherUserThatCannotBeReadFailsTheArchiveByName(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	b := newBox(t)
	must(t, os.WriteFile(b.work+"/root's", nil, 0o600))
	b.asUser(func() {
		list, last := members(t, b.archive())
		if name := list[len(list)-1].Name; name != failureName || !bytes.Contains(last, []byte(`root's`)) || !bytes.Contains(last, []byte("forbidden")) {
			t.Errorf("%s: %s", name, last)
		}
	})
	if calls := b.processes.seen(); calls != "freeze thaw" {
		t.Error(calls)
	}
}

func TestARefusedManifestFreezesNothing(t *testing.T) {
	b := newBox(t)
	for body, status := range map[string]int{"no json": 400, "": 400, `"` + strings.Repeat("x", maxManifest) + `"`: 413} {
		w := httptest.NewRecorder()
		b.mux.ServeHTTP(w, httptest.NewRequest("POST", "/v1/archive", strings.NewReader(body)))
		if w.Code != status {
			t.Errorf("%.10q: %d %s", body, w.Code, w.Body)
		}
	}
	release, err := b.gate.Hold(t.Context(), gate.Archiving)
	must(t, err)
	w := httptest.NewRecorder()
	b.mux.ServeHTTP(w, httptest.NewRequest("POST", "/v1/archive", strings.NewReader("{}")))
	if w.Code != 409 || b.restore(nil, plenty).Code != 409 {
		t.Error("two at a time")
	}
	release()
	if calls := b.processes.seen(); calls != "" {
		t.Error(calls)
	}
}

// serve runs the handler behind a real socket and returns a connection to it.
func (b *box) serve() net.Conn {
	b.t.Helper()
	listener, err := net.Listen("unix", filepath.Dir(b.work)+"/s")
	must(b.t, err)
	server := &http.Server{Handler: b.mux}
	go func() { _ = server.Serve(listener) }()
	b.t.Cleanup(func() { _ = server.Close() })
	conn, err := net.Dial("unix", listener.Addr().String())
	must(b.t, err)
	b.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (b *box) waitForThaw() {
	b.t.Helper()
	select {
	case <-b.processes.thawed:
	case <-time.After(10 * time.Second):
		b.t.Fatal("still frozen")
	}
}

func TestTheFreezeEndsWhenNobodyReadsAndWhenTheChannelDies(t *testing.T) {
	for name, leave := range map[string]func(net.Conn){
		"stalls": func(net.Conn) {},
		"dies":   func(c net.Conn) { _ = c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			b.handler.out = patience{stall: 200 * time.Millisecond, total: time.Minute}
			if name == "dies" {
				b.handler.out.stall = time.Minute
			}
			must(t, os.WriteFile(b.work+"/big", make([]byte, 64<<20), 0o644))
			conn := b.serve()
			_, err := io.WriteString(conn, "POST /v1/archive HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
			must(t, err)
			if _, err := io.ReadFull(conn, make([]byte, 1<<20)); err != nil {
				t.Fatal(err)
			}
			leave(conn)
			b.waitForThaw()
			if name == "stalls" {
				rest, _ := io.ReadAll(conn)
				if bytes.Contains(rest, []byte(indexName)) || bytes.HasSuffix(rest, []byte("0\r\n\r\n")) {
					t.Error("the archive looks whole")
				}
			}
		})
	}
}

func TestAnArchiveThatTakesTooLongThawsAndSaysWhy(t *testing.T) {
	b := newBox(t)
	b.handler.out = patience{stall: time.Minute, total: 50 * time.Millisecond}
	must(t, os.WriteFile(b.work+"/big", make([]byte, 32<<20), 0o644))
	must(t, os.WriteFile(b.work+"/small", nil, 0o644))
	conn := b.serve()
	_, err := io.WriteString(conn, "POST /v1/archive HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
	must(t, err)
	if _, err := io.ReadFull(conn, make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	b.waitForThaw()
	rest, err := io.ReadAll(conn)
	must(t, err)
	if bytes.Contains(rest, []byte(indexName)) || !bytes.Contains(rest, []byte("took longer than")) {
		t.Error("no reason at the end of the archive")
	}
}

func TestSparseSegmentsAreBoundedByGivingUpSmallHoles(t *testing.T) {
	file, err := os.Create(t.TempDir() + "/f")
	must(t, err)
	defer func() { _ = file.Close() }()
	for i := range 64 {
		_, err := file.WriteAt([]byte{1}, int64(i)*16384)
		must(t, err)
	}
	_, err = file.WriteAt([]byte{1}, 100<<20)
	must(t, err)
	segments, sparse, err := findSegments(int(file.Fd()), 100<<20+1, 8)
	must(t, err)
	if !sparse || len(segments) < 2 || len(segments) > 8 || segments[len(segments)-1].Offset < 99<<20 {
		t.Errorf("%v %v", sparse, segments)
	}
}

func TestADepthThatCannotBeKeptIsSaid(t *testing.T) {
	b := newBox(t)
	fd, err := tree.Open(unix.AT_FDCWD, b.work, folderFlags, 0)
	must(t, err)
	for range maxDepth + 10 {
		must(t, unix.Mkdirat(fd, "d", 0o755))
		next, err := tree.Open(fd, "d", folderFlags, 0)
		must(t, err)
		_ = unix.Close(fd)
		fd = next
	}
	_ = unix.Close(fd)
	_, last := members(t, b.archive())
	if !bytes.Contains(last, []byte("folders deep")) {
		t.Errorf("%s", last)
	}
	spoil(t, b.work) // removes it all the same
}
