package files

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentsandbox.dev/init/internal/gate"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

func TestAWriteOntoTheWorkspaceItselfIsRefusedAsADirectory(t *testing.T) {
	b := newBox(t)
	for _, path := range []string{b.work, ".", b.work + "/."} {
		b.want(400, b.put(path, "x"))
	}
}

func TestRanges(t *testing.T) {
	b := newBox(t)
	b.want(200, b.put("f", "0123456789"))
	for header, want := range map[string]struct {
		status int
		body   string
		place  string
	}{
		"bytes=0-3": {206, "0123", "bytes 0-3/10"}, "bytes=4-": {206, "456789", "bytes 4-9/10"}, "bytes=-3": {206, "789", "bytes 7-9/10"}, "bytes=8-99": {206, "89", "bytes 8-9/10"},
		"bytes=-99": {206, "0123456789", "bytes 0-9/10"}, "bytes=10-": {416, "", "bytes */10"}, "bytes=-0": {416, "", "bytes */10"}, "bytes=3-2": {200, "0123456789", ""},
		"lines=1-2": {200, "0123456789", ""}, "bytes=0-1,4-5": {200, "0123456789", ""}, "bytes=x-": {200, "0123456789", ""}, "bytes=--1": {200, "0123456789", ""},
	} {
		r := httptest.NewRequest("GET", "/v1/files?path=f", nil)
		r.Header.Set("Range", header)
		w := httptest.NewRecorder()
		b.mux.ServeHTTP(w, r)
		if w.Code != want.status || w.Header().Get("Content-Range") != want.place || (w.Code != 416 && w.Body.String() != want.body) {
			t.Errorf("%s: %d %q %q", header, w.Code, w.Header().Get("Content-Range"), w.Body)
		}
		if w.Code != 416 {
			var i wireInfo
			raw, _ := base64.StdEncoding.DecodeString(w.Header().Get("File-Info"))
			if err := json.Unmarshal(raw, &i); err != nil || i.Size != 10 || string(i.Name) != "f" {
				t.Errorf("File-Info %q", raw)
			}
		}
	}
}

func TestAFileThatShrinksOrGrowsWhileItIsReadIsNeverPassedOffAsWhole(t *testing.T) {
	b := newBox(t)
	socket := filepath.Join(filepath.Dir(b.work), "socket")
	listener, err := net.Listen("unix", socket)
	must(t, err)
	server := &http.Server{Handler: b.mux}
	go func() { _ = server.Serve(listener) }()
	defer func() { _ = server.Close() }()
	const size = 8 << 20
	for name, change := range map[string]func() error{
		"shrinks": func() error { return os.Truncate(b.at("shrinks"), 1<<20) },
		"grows":   func() error { return os.Truncate(b.at("grows"), 2*size) },
	} {
		must(t, os.WriteFile(b.at(name), make([]byte, size), 0o644))
		conn, err := net.Dial("unix", socket) // its buffers hold far less than the file
		must(t, err)
		_, err = fmt.Fprintf(conn, "GET /v1/files?path=%s HTTP/1.1\r\nHost: x\r\n\r\n", name)
		must(t, err)
		reader := bufio.NewReader(conn)
		response, err := http.ReadResponse(reader, nil)
		must(t, err)
		must(t, change())
		n, err := io.Copy(io.Discard, response.Body)
		_ = conn.Close()
		if response.ContentLength != size {
			t.Errorf("%s: announced %d", name, response.ContentLength)
		}
		if name == "grows" && (err != nil || n != size) {
			t.Errorf("grows: %d %v", n, err)
		}
		if name == "shrinks" && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("shrinks: %d bytes, then %v", n, err)
		}
	}
}

func TestRemoveAndMove(t *testing.T) {
	b := newBox(t)
	b.want(200, b.put("d/x", "x"))
	b.want(200, b.put("y", "y"))
	b.want(409, b.call("DELETE", "/v1/files", nil, "path", "d"))
	b.want(404, b.call("DELETE", "/v1/files", nil, "path", "none"))
	b.want(400, b.call("DELETE", "/v1/files", nil, "path", "d", "recursive", "yes"))
	b.want(409, b.call("POST", "/v1/move", nil, "from", "y", "to", "d/x"))
	b.want(409, b.call("POST", "/v1/move", nil, "from", "y", "to", "d", "overwrite", "1"))
	b.want(404, b.call("POST", "/v1/move", nil, "from", "none", "to", "z"))
	b.want(404, b.call("POST", "/v1/move", nil, "from", "y", "to", "none/z"))
	b.want(400, b.call("POST", "/v1/move", nil, "from", "d", "to", "d/inside"))
	b.want(400, b.call("POST", "/v1/move", nil, "from", "y", "to", "z/.."))
	b.want(200, b.call("POST", "/v1/move", nil, "from", "y", "to", "d/x", "overwrite", "1"))
	if string(b.get("d/x").body) != "y" || len(b.names()) != 2 {
		t.Error("move with overwrite did not replace")
	}
	must(t, os.Link(b.at("d/x"), b.at("same")))
	b.want(200, b.call("POST", "/v1/move", nil, "from", "same", "to", "d/x", "overwrite", "1"))
	b.want(200, b.call("POST", "/v1/move", nil, "from", "d/x", "to", "d/x", "overwrite", "1"))
	if names := b.names(); len(names) != 2 {
		t.Errorf("after a move onto the same file: %q", names)
	}
	b.want(204, b.call("DELETE", "/v1/files", nil, "path", "d", "recursive", "1"))
}

func TestClosedFilesAndFoldersAreForbiddenAndClosedTreesCanBeRemoved(t *testing.T) {
	b := newBox(t)
	must(t, os.MkdirAll(b.at("tree/closed/in"), 0o755))
	must(t, os.WriteFile(b.at("tree/closed/in/f"), nil, 0o000))
	must(t, filepath.Walk(b.work, func(path string, _ os.FileInfo, _ error) error { return os.Lchown(path, 1000, 1000) }))
	must(t, os.Chmod(b.at("tree/closed/in"), 0o000))
	must(t, os.Chmod(b.at("tree/closed"), 0o500))
	must(t, os.Chmod(filepath.Dir(b.work), 0o755))
	must(t, os.Chmod(filepath.Dir(filepath.Dir(b.work)), 0o755))
	asUser(t, func() {
		b.want(403, b.put("tree/closed/x", "x"))
		b.want(403, b.get("tree/closed/in/f"))
		b.want(403, b.call("POST", "/v1/mkdir", nil, "path", "tree/closed/new"))
		b.want(204, b.call("DELETE", "/v1/files", nil, "path", "tree", "recursive", "1"))
	})
	if left := b.names(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestAFullOrReadOnlyDiskIsSaidAndLeavesNothing(t *testing.T) {
	b := newBox(t)
	if err := unix.Mount("tmpfs", b.work, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	defer func() { _ = unix.Unmount(b.work, unix.MNT_DETACH) }()
	b.want(507, b.put("new/big", strings.Repeat("x", 2<<20)))
	if left := b.names(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	must(t, os.Mkdir(b.at("mounted"), 0o755))
	must(t, unix.Mount("tmpfs", b.at("mounted"), "tmpfs", 0, "size=1m"))
	b.want(403, b.put("mounted/x", "another mount"))
	b.want(409, b.call("DELETE", "/v1/files", nil, "path", "mounted", "recursive", "1"))
	must(t, unix.Unmount(b.at("mounted"), 0))
	must(t, unix.Mount("", b.work, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	b.want(403, b.put("x", "x"))
	b.want(403, b.call("DELETE", "/v1/files", nil, "path", "mounted"))
}

func TestEverythingIsBusyDuringARestore(t *testing.T) {
	b := newBox(t)
	b.want(200, b.put("f", "x"))
	release, err := b.gate.Hold(t.Context(), gate.Restoring)
	must(t, err)
	for _, r := range []reply{
		b.get("f"), b.put("f", "y"), b.call("GET", "/v1/stat", nil, "path", "f"), b.call("GET", "/v1/list", nil, "path", "."), b.call("POST", "/v1/mkdir", nil, "path", "d"),
		b.call("DELETE", "/v1/files", nil, "path", "f"), b.call("POST", "/v1/move", nil, "from", "f", "to", "g"),
	} {
		if r.status != 409 || !strings.HasPrefix(r.message(), "busy: ") {
			t.Errorf("%d %s", r.status, r.body)
		}
	}
	release()
	b.want(200, b.get("f"))
}

func TestNoCallLeaksADescriptor(t *testing.T) {
	b := newBox(t)
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(entries)
	}
	round := func() {
		for _, path := range []string{"a/b/c", "../x", "a", "", tree.Reserved, "a/b/c/d", "/proc/self/x", "new/../../x"} {
			b.put(path, "x")
			b.get(path)
			b.call("GET", "/v1/stat", nil, "path", path)
			b.call("GET", "/v1/list", nil, "path", path)
			b.call("POST", "/v1/mkdir", nil, "path", path)
			b.call("POST", "/v1/move", nil, "from", path, "to", "z")
			b.call("POST", "/v1/move", nil, "from", "z", "to", path)
			b.call("PUT", "/v1/files", &brokenBody{}, "path", path)
		}
		b.call("DELETE", "/v1/files", nil, "path", "a", "recursive", "1")
	}
	round()
	before := count()
	for range 20 {
		round()
	}
	if after := count(); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

func FuzzNoPathLeadsAWriteOut(f *testing.F) {
	for _, seed := range []string{"a", "../x", "a/../../x", "out/x", "/etc/x", "./.sandbox-init", "a//b/./c", "in/../../x", "\xff", "a/b/../c"} {
		f.Add(seed)
	}
	dir := f.TempDir()
	work := dir + "/guard/workspace"
	if err := errors.Join(os.MkdirAll(work, 0o755), os.MkdirAll(dir+"/guard/outside", 0o755), os.Symlink("../outside", work+"/out"), os.Symlink(".", work+"/in")); err != nil {
		f.Fatal(err)
	}
	mux := http.NewServeMux()
	New(work, &gate.Gate{}).Register(mux)
	f.Fuzz(func(t *testing.T, path string) {
		if strings.HasPrefix(path, "/") && !strings.HasPrefix(path, "/proc") {
			path = work + path
		}
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest("PUT", "/v1/files?path="+url.QueryEscape(path), strings.NewReader("x")))
		if w.Code >= 500 {
			t.Errorf("%q: %d %s", path, w.Code, w.Body)
		}
		for _, place := range []string{"/guard", "/guard/outside"} {
			entries, _ := os.ReadDir(dir + place)
			if want := map[string]int{"/guard": 2, "/guard/outside": 0}[place]; len(entries) != want {
				t.Fatalf("%q made something in %s", path, place)
			}
		}
	})
}
