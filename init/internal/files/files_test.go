package files

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"agentsandbox.dev/init/internal/gate"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

// box is a workspace with its handler.
type box struct {
	t    *testing.T
	work string
	gate *gate.Gate
	mux  *http.ServeMux
}

func newBox(t *testing.T) *box {
	t.Helper()
	b := &box{t: t, work: filepath.Join(t.TempDir(), "workspace"), gate: &gate.Gate{}, mux: http.NewServeMux()}
	if err := os.Mkdir(b.work, 0o755); err != nil {
		t.Fatal(err)
	}
	New(b.work, b.gate).Register(b.mux)
	return b
}

type reply struct {
	status int
	body   []byte
	header http.Header
}

func (r reply) message() string {
	var e struct {
		Error struct{ Code, Message string }
	}
	_ = json.Unmarshal(r.body, &e)
	return e.Error.Code + ": " + e.Error.Message
}

// call makes one call in this goroutine; query is pairs of name and value.
func (b *box) call(method, path string, body io.Reader, query ...string) reply {
	b.t.Helper()
	values := url.Values{}
	for i := 0; i < len(query); i += 2 {
		values.Set(query[i], query[i+1])
	}
	w := httptest.NewRecorder()
	b.mux.ServeHTTP(w, httptest.NewRequest(method, path+"?"+values.Encode(), body))
	return reply{w.Code, w.Body.Bytes(), w.Header()}
}

func (b *box) want(status int, r reply) reply {
	b.t.Helper()
	if r.status != status {
		b.t.Fatalf("status %d, not %d: %s", r.status, status, r.body)
	}
	return r
}

func (b *box) put(path, content string) reply {
	b.t.Helper()
	return b.call("PUT", "/v1/files", strings.NewReader(content), "path", path)
}

func (b *box) get(path string) reply {
	b.t.Helper()
	return b.call("GET", "/v1/files", nil, "path", path)
}

func (b *box) at(name string) string { return filepath.Join(b.work, name) }

// names lists everything below the workspace.
func (b *box) names() []string {
	b.t.Helper()
	var all []string
	_ = filepath.Walk(b.work, func(path string, _ os.FileInfo, _ error) error {
		if path != b.work {
			all = append(all, path[len(b.work)+1:])
		}
		return nil
	})
	return all
}

type wireInfo struct {
	Name, Path []byte
	Type       string
	Size       int64
	Mode       string
	MtimeNS    int64 `json:"mtime_ns"`
	End        bool
	Count      int
}

func (b *box) list(path string) (infos []wireInfo) {
	b.t.Helper()
	r := b.want(200, b.call("GET", "/v1/list", nil, "path", path))
	for line := range bytes.Lines(r.body) {
		var i wireInfo
		if err := json.Unmarshal(line, &i); err != nil {
			b.t.Fatalf("%q: %v", line, err)
		}
		infos = append(infos, i)
	}
	last := infos[len(infos)-1]
	if !last.End || last.Count != len(infos)-1 {
		b.t.Fatalf("the last line is %+v", last)
	}
	return infos[:len(infos)-1]
}

// asUser runs f without root's permission to do everything, as uid 1000 where files are concerned.
func asUser(t *testing.T, f func()) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Setfsuid(1000); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Setfsuid(0) }()
	f()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestAwkwardNamesSurviveWriteReadListAndRemove(t *testing.T) {
	b := newBox(t)
	names := []string{
		"a b.txt", "[x].txt", "broken[.txt", "2026-01-02_22:34.log", "-rf", "--checkpoint=1", "$(id).txt", `quo'te".txt`, "日本語.txt", "é.txt", "e\u0301.txt",
		"*.txt", "~", `back\slash`, "%2e%2e.txt", "...", "new\nline", "\xff\xfe raw", "a+b&c=d;e#f?g", strings.Repeat("n", 255),
	}
	for _, name := range names {
		r := b.want(200, b.put(name, "content of "+name))
		var i wireInfo
		must(t, json.Unmarshal(r.body, &i))
		if string(i.Name) != name || string(i.Path) != b.work+"/"+name || i.Type != "file" || i.Mode != "0644" || i.Size != int64(len(name)+11) {
			t.Errorf("PUT %q answered %+v", name, i)
		}
		if got := b.want(200, b.get(name)); string(got.body) != "content of "+name {
			t.Errorf("GET %q gave %q", name, got.body)
		}
	}
	listed := b.list(".")
	if len(listed) != len(names) {
		t.Errorf("%d names listed, %d written", len(listed), len(names))
	}
	for i := 1; i < len(listed); i++ {
		if bytes.Compare(listed[i-1].Name, listed[i].Name) >= 0 {
			t.Errorf("%q is listed before %q", listed[i-1].Name, listed[i].Name)
		}
	}
	for _, name := range names {
		b.want(204, b.call("DELETE", "/v1/files", nil, "path", b.work+"/"+name))
	}
	if left := b.names(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestPathsThatCanBeNoneAreInvalid(t *testing.T) {
	b := newBox(t)
	must(t, os.WriteFile(b.at("file"), nil, 0o644))
	for _, path := range []string{
		"", "nul\x00", "//workspace/x", strings.Repeat("n", 256), "d/" + strings.Repeat("n", 256) + "/x", strings.Repeat("x/", 2048) + "y",
		"file/x", "file/x/y", "x/", ".", "..", "/", "a/..", "a/.",
	} {
		if r := b.put(path, "x"); r.status != 400 {
			t.Errorf("PUT %.40q: %d %s", path, r.status, r.body)
		}
	}
	for _, query := range []string{"path=%zz", "path=%", "x=1"} {
		w := httptest.NewRecorder()
		b.mux.ServeHTTP(w, httptest.NewRequest("GET", "/v1/files?"+query, nil))
		if w.Code != 400 {
			t.Errorf("%s: %d", query, w.Code)
		}
	}
	if left := b.names(); len(left) != 1 {
		t.Errorf("left: %q", left)
	}
}

func TestWritesStayInTheWorkspaceAlsoAfterLinksAndDots(t *testing.T) {
	b := newBox(t)
	outside := filepath.Dir(b.work) + "/outside"
	must(t, os.Mkdir(outside, 0o755))
	must(t, os.WriteFile(outside+"/secret", []byte("s"), 0o644))
	must(t, os.Symlink(outside, b.at("out")))
	must(t, os.Symlink(outside+"/secret", b.at("pw")))
	must(t, os.Symlink(outside+"/none", b.at("dangling")))
	must(t, os.Symlink("/", b.at("root")))
	must(t, os.Mkdir(b.at("real"), 0o755))
	must(t, os.Symlink("real", b.at("inside")))
	must(t, os.Symlink("loop", b.at("loop")))
	for path, status := range map[string]int{
		"out/evil": 403, "../x": 403, b.work + "/../outside/x": 403, b.work + "/./../outside/x": 403, "out/new/deep/x": 403, "root/tmp/x": 403,
		"/proc/self/cwd/x": 403, "/tmp/x": 403, "new/../../outside/x": 403, "/new-top-folder/x": 403, "dangling/x": 400, "loop/x": 400,
		"inside/ok": 200, "root" + b.work + "/ok": 200, "/proc/self/root" + b.work + "/ok2": 200, "made/../made2/ok": 200, "pw": 200,
	} {
		if r := b.put(path, "new"); r.status != status {
			t.Errorf("PUT %s: %d %s", path, r.status, r.body)
		}
		if status == 403 {
			for _, r := range []reply{
				b.call("POST", "/v1/mkdir", nil, "path", path), b.call("POST", "/v1/move", nil, "from", "real", "to", path),
				b.call("DELETE", "/v1/files", nil, "path", path, "recursive", "1"), b.call("POST", "/v1/move", nil, "from", path, "to", "x"),
			} {
				if r.status != 403 && r.status != 404 {
					t.Errorf("%s: %d %s", path, r.status, r.body)
				}
			}
		}
	}
	if data, _ := os.ReadFile(outside + "/secret"); string(data) != "s" {
		t.Error("a write went through the link")
	}
	if fi, _ := os.Lstat(b.at("pw")); !fi.Mode().IsRegular() {
		t.Error("the link was not replaced")
	}
	entries, _ := os.ReadDir(outside)
	if len(entries) != 1 {
		t.Errorf("outside has %v", entries)
	}
	b.want(204, b.call("DELETE", "/v1/files", nil, "path", "out"))
	if _, err := os.Stat(outside + "/secret"); err != nil {
		t.Error("removing a link removed its target")
	}
	b.want(403, b.call("DELETE", "/v1/files", nil, "path", b.work, "recursive", "1"))
}

func TestALinkThatAppearsLateDoesNotLeadAWriteOut(t *testing.T) {
	b := newBox(t)
	outside := filepath.Dir(b.work) + "/outside"
	must(t, os.Mkdir(outside, 0o755))
	must(t, os.Mkdir(b.at("dir"), 0o755))
	stop, done := make(chan struct{}), make(chan struct{})
	go func() { // exchanges the folder and a link out, again and again
		defer close(done)
		_ = os.Symlink(outside, b.at("link"))
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, b.at("dir"), unix.AT_FDCWD, b.at("link"), unix.RENAME_EXCHANGE)
			}
		}
	}()
	for i := range 2000 {
		r := b.put(fmt.Sprintf("dir/sub%d/x", i), "x")
		if r.status != 200 && r.status != 403 && r.status != 400 {
			t.Errorf("%d %s", r.status, r.body)
		}
	}
	close(stop)
	<-done
	if entries, _ := os.ReadDir(outside); len(entries) > 0 {
		t.Errorf("%d entries came out", len(entries))
	}
}

func TestTheReservedNameIsClosedAndHidden(t *testing.T) {
	b := newBox(t)
	must(t, os.Mkdir(b.at(tree.Reserved), 0o700))
	must(t, os.WriteFile(b.at(tree.Reserved+"/x"), nil, 0o600))
	must(t, os.Symlink(tree.Reserved, b.at("way")))
	must(t, os.WriteFile(b.at(tree.TemporaryName([16]byte{1})), nil, 0o600))
	must(t, os.Mkdir(b.at("sub"), 0o755))
	for _, path := range []string{tree.Reserved, tree.Reserved + "/y", "way/y", "./" + tree.Reserved + "/y", "sub/../" + tree.Reserved + "/y"} {
		b.want(400, b.put(path, "x"))
		b.want(400, b.call("POST", "/v1/mkdir", nil, "path", path+"/z"))
		b.want(400, b.call("DELETE", "/v1/files", nil, "path", path, "recursive", "1"))
		b.want(400, b.call("POST", "/v1/move", nil, "from", "sub", "to", path))
		b.want(400, b.call("POST", "/v1/move", nil, "from", path, "to", "y"))
	}
	b.want(400, b.get(tree.Reserved+"/x"))
	b.want(400, b.call("GET", "/v1/list", nil, "path", "way"))
	b.want(400, b.call("GET", "/v1/stat", nil, "path", tree.Reserved))
	for _, i := range b.list(".") {
		if string(i.Name) != "way" && string(i.Name) != "sub" {
			t.Errorf("%q is listed", i.Name)
		}
	}
	must(t, os.RemoveAll(b.at(tree.Reserved)))
	for _, path := range []string{tree.Reserved, tree.Reserved + "/y", "new/../" + tree.Reserved, "new/../" + tree.Reserved + "/y"} {
		b.want(400, b.put(path, "x"))
	}
	b.want(200, b.put("sub/"+tree.Reserved, "only the top is reserved"))
	if _, err := os.Lstat(b.at("new")); err == nil {
		t.Error("a refused write left a folder")
	}
}

func TestInitsOwnProcFilesAreRefusedByEveryWay(t *testing.T) {
	b := newBox(t)
	must(t, os.Symlink("/proc/self", b.at("me")))
	must(t, os.Symlink("/proc", b.at("proc")))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own, thread := fmt.Sprint(os.Getpid()), fmt.Sprint(unix.Gettid())
	for _, path := range []string{
		"/proc/self/environ", "/proc/1/environ", "/proc/thread-self/environ", "/proc/" + own + "/environ", "/proc/" + thread + "/environ", "me/environ", "proc/self/environ",
		"proc/1/environ", "/proc/self/task/" + thread + "/environ", "/proc/../proc/self/environ", "/proc/self/root/proc/self/environ", "/proc/self/root/etc/passwd", "proc/self/cwd/handler.go", "me/fd/0",
	} {
		b.want(403, b.get(path))
	}
	for _, path := range []string{"/proc/self", "/proc/1", "me", "/proc/self/fd"} {
		b.want(403, b.call("GET", "/v1/list", nil, "path", path))
	}
	b.want(403, b.call("GET", "/v1/stat", nil, "path", "/proc/self/environ"))
	b.want(403, b.call("GET", "/v1/stat", nil, "path", "/proc/1"))
	if r := b.want(200, b.get("/proc/meminfo")); !bytes.Contains(r.body, []byte("MemTotal")) || r.header.Get("Content-Length") != fmt.Sprint(len(r.body)) {
		t.Errorf("a file that the kernel makes is not whole: %q", r.body)
	}
	b.want(200, b.call("GET", "/v1/list", nil, "path", "/proc/sys"))
}

func TestOnlyRegularFilesAreReadOrReplaced(t *testing.T) {
	b := newBox(t)
	must(t, os.Mkdir(b.at("dir"), 0o755))
	must(t, unix.Mkfifo(b.at("fifo"), 0o644))
	l, err := net.Listen("unix", b.at("socket"))
	must(t, err)
	defer func() { _ = l.Close() }()
	for _, path := range []string{"dir", "fifo", "socket", "/dev/null", "dir/"} {
		b.want(400, b.get(path))
		if !strings.HasPrefix(path, "/") {
			b.want(400, b.put(path, "x"))
		}
	}
	b.want(404, b.get("none"))
	b.want(404, b.get("none/deeper"))
	b.want(400, b.call("GET", "/v1/list", nil, "path", "fifo"))
	b.want(404, b.call("GET", "/v1/list", nil, "path", "none"))
	if i := b.list("."); len(i) != 3 || i[0].Type != "directory" || i[1].Type != "other" || i[2].Type != "other" {
		t.Errorf("%+v", i)
	}
}

func TestModesAreExactWhateverTheUmask(t *testing.T) {
	b := newBox(t)
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	must(t, os.Chmod(b.work, 0o2775|os.ModeSetgid))
	for _, mode := range []string{"000", "600", "0777", "0444", "755"} {
		b.want(200, b.call("PUT", "/v1/files", strings.NewReader("x"), "path", "deep/er/"+mode, "mode", mode))
		if fi, err := os.Stat(b.at("deep/er/" + mode)); err != nil || fmt.Sprintf("%03o", fi.Mode()) != strings.TrimPrefix(fmt.Sprintf("%04s", mode), "0") {
			t.Errorf("mode %s became %v %v", mode, fi.Mode(), err)
		}
	}
	for _, dir := range []string{"deep", "deep/er"} {
		if fi, _ := os.Stat(b.at(dir)); fi.Mode() != os.ModeDir|0o755 {
			t.Errorf("%s has mode %v", dir, fi.Mode())
		}
	}
	b.want(200, b.call("POST", "/v1/mkdir", nil, "path", "made/it", "mode", "700"))
	if fi, _ := os.Stat(b.at("made/it")); fi.Mode() != os.ModeDir|0o700 {
		t.Errorf("mkdir gave %v", fi.Mode())
	}
	b.want(200, b.call("POST", "/v1/mkdir", nil, "path", "made/it", "mode", "755"))
	if fi, _ := os.Stat(b.at("made/it")); fi.Mode() != os.ModeDir|0o700 {
		t.Error("mkdir changed a directory that was there")
	}
	b.want(200, b.call("POST", "/v1/mkdir", nil, "path", b.work))
	b.want(409, b.call("POST", "/v1/mkdir", nil, "path", "deep/er/600"))
	for _, mode := range []string{"1777", "78", "7", "888", "-1", "+644", "00644"} {
		b.want(400, b.call("PUT", "/v1/files", strings.NewReader("x"), "path", "x", "mode", mode))
	}
}

func TestABodyOverTheLimitLeavesNothing(t *testing.T) {
	b := newBox(t)
	for _, body := range []io.Reader{strings.NewReader("123456"), io.MultiReader(strings.NewReader("123"), strings.NewReader("456"))} {
		b.want(413, b.call("PUT", "/v1/files", body, "path", "new/x", "max_bytes", "5"))
	}
	if left := b.names(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	b.want(200, b.call("PUT", "/v1/files", strings.NewReader("12345"), "path", "new/x", "max_bytes", "5"))
	b.want(413, b.call("GET", "/v1/files", nil, "path", "new/x", "max_bytes", "4"))
	b.want(200, b.call("GET", "/v1/files", nil, "path", "new/x", "max_bytes", "5"))
	b.want(400, b.call("PUT", "/v1/files", strings.NewReader("1"), "path", "new/x", "max_bytes", "many"))
}

// brokenBody gives some bytes and then fails.
type brokenBody struct{ sent bool }

func (b *brokenBody) Read(p []byte) (int, error) {
	if b.sent {
		return 0, io.ErrUnexpectedEOF
	}
	b.sent = true
	return copy(p, "half"), nil
}

func TestABodyThatEndsEarlyLeavesTheOldFileAndNothingElse(t *testing.T) {
	b := newBox(t)
	b.want(200, b.put("old", "old content"))
	b.want(400, b.call("PUT", "/v1/files", &brokenBody{}, "path", "old"))
	b.want(400, b.call("PUT", "/v1/files", &brokenBody{}, "path", "new/folder/x"))
	if left := b.names(); len(left) != 1 || string(b.get("old").body) != "old content" {
		t.Errorf("left: %q", left)
	}
	// The same for a file system that has no files without a name.
	fd, err := tree.Open(unix.AT_FDCWD, b.work, folderFlags, 0)
	must(t, err)
	defer func() { _ = unix.Close(fd) }()
	u, err := newNamedUpload(fd)
	must(t, err)
	if err := u.receive(&brokenBody{}, "x", 0, false); err == nil {
		t.Error("a broken body passed")
	}
	if len(b.list(".")) != 1 {
		t.Error("an upload in flight is listed")
	}
	u.close()
	u, err = newNamedUpload(fd)
	must(t, err)
	must(t, u.receive(strings.NewReader("new content"), "x", 0, false))
	if _, err := u.commit(fd, "old", "old"); err != nil {
		t.Error(err)
	}
	u.close()
	if left := b.names(); len(left) != 1 || string(b.get("old").body) != "new content" {
		t.Errorf("left: %q", left)
	}
}
