package archive

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"agentsandbox.dev/init/internal/tarfmt"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

// member is what craft writes.
type member struct {
	tarfmt.Header
	data string
}

func file(name, data string) member {
	return member{tarfmt.Header{Name: name, Type: tarfmt.File, Mode: 0o644, Size: int64(len(data))}, data}
}

func folder(name string) member {
	return member{tarfmt.Header{Name: name, Type: tarfmt.Directory, Mode: 0o755}, ""}
}

func pointer(kind tarfmt.Type, name, target string) member {
	return member{tarfmt.Header{Name: name, Type: kind, Mode: 0o777, Linkname: target}, ""}
}

// craft writes an archive of these members, with an index that fits them unless it is changed.
func craft(t testing.TB, change func(*Index), list ...member) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tarfmt.NewWriter(&out)
	must(t, w.WriteFile(manifestName, []byte("{}")))
	index := Index{Format: 1}
	for _, m := range list {
		must(t, w.WriteHeader(&m.Header))
		must(t, w.Data(int64(len(m.data)), strings.NewReader(m.data).Read))
		index.Entries++
		index.Bytes += int64(len(m.data))
		switch m.Type {
		case tarfmt.File:
			index.Files++
		case tarfmt.Directory:
			index.Directories++
		case tarfmt.Symlink:
			index.Symlinks++
		case tarfmt.Hardlink:
			index.Hardlinks++
		}
	}
	index.SHA256 = w.Sum()
	if change != nil {
		change(&index)
	}
	text, err := json.Marshal(index)
	must(t, err)
	must(t, errors.Join(w.WriteFile(indexName, text), w.Close()))
	return out.Bytes()
}

func TestHostileAndDamagedArchivesAreRefusedAndChangeNothing(t *testing.T) {
	b := newBox(t)
	outside := filepath.Dir(b.work) + "/outside"
	must(t, os.WriteFile(outside, []byte("o"), 0o644))
	must(t, os.Mkdir(b.work+"/kept", 0o755))
	must(t, os.WriteFile(b.work+"/kept/f", []byte("kept"), 0o644))
	must(t, os.WriteFile(b.tmp+"/kept", nil, 0o644))
	all := func() map[string]string {
		lines := describe(t, filepath.Dir(b.work))
		delete(lines, "workspace") // its time changes with the staging folder
		return lines
	}
	before := all()
	good := craft(t, nil, file("f", "content"))
	flipped := bytes.Clone(good)
	flipped[bytes.Index(flipped, []byte("content"))] ^= 1
	failed := func() []byte {
		var out bytes.Buffer
		w := tarfmt.NewWriter(&out)
		must(t, errors.Join(w.WriteFile(manifestName, []byte("{}")), w.WriteFile(failureName, []byte("{}")), w.Close()))
		return out.Bytes()
	}()
	noManifest := func() []byte {
		var out bytes.Buffer
		w := tarfmt.NewWriter(&out)
		must(t, errors.Join(w.WriteFile("f", nil), w.Close()))
		return out.Bytes()
	}()
	for name, archive := range map[string][]byte{
		"nothing": {}, "no tar": []byte(strings.Repeat("no tar ", 1000)), "cut": good[:len(good)-1500], "without its end": good[:len(good)-1024], "a flipped byte": flipped, "bytes behind": append(bytes.Clone(good), "x"...),
		"no index": craftWithoutIndex(t), "a failed snapshot": failed, "no manifest": noManifest,
		"absolute": craft(t, nil, file("/etc/x", "")), "dots": craft(t, nil, file("../outside", "x")), "dots inside": craft(t, nil, folder("a"), file("a/../../outside", "x")),
		"through a link": craft(t, nil, pointer(tarfmt.Symlink, "l", ".."), file("l/outside", "x")), "over a link": craft(t, nil, pointer(tarfmt.Symlink, "l", "../outside"), file("l", "x")),
		"a folder over a link": craft(t, nil, pointer(tarfmt.Symlink, "l", ".."), folder("l"), file("l/x", "x")), "through a file": craft(t, nil, file("f", ""), file("f/x", "x")),
		"no folder before": craft(t, nil, file("a/x", "x")), "back in a closed folder": craft(t, nil, folder("a"), folder("b"), file("a/x", "x")), "twice": craft(t, nil, file("f", "1"), file("f", "2")), "a folder twice": craft(t, nil, folder("a"), folder("a")),
		"a hard link out": craft(t, nil, pointer(tarfmt.Hardlink, "h", "../outside")), "a hard link to nothing": craft(t, nil, pointer(tarfmt.Hardlink, "h", "f")), "a hard link forward": craft(t, nil, pointer(tarfmt.Hardlink, "h", "z"), file("z", "")),
		"a hard link to a folder": craft(t, nil, folder("a"), pointer(tarfmt.Hardlink, "h", "a")), "a hard link through a link": craft(t, nil, folder("d"), file("d/f", ""), pointer(tarfmt.Symlink, "l", "d"), pointer(tarfmt.Hardlink, "z", "l/f")),
		"a hard link to a link": craft(t, nil, pointer(tarfmt.Symlink, "a", "../outside"), pointer(tarfmt.Hardlink, "h", "a")), "a hard link to the manifest": craft(t, nil, pointer(tarfmt.Hardlink, "h", manifestName)),
		"the reserved name": craft(t, nil, folder(tree.Reserved)), "in the reserved folder": craft(t, nil, file(tree.Reserved+"/swap", "")), "lost+found": craft(t, nil, folder(tree.LostFound)), "a second manifest": craft(t, nil, file(manifestName, "{}")),
		"another count": craft(t, func(i *Index) { i.Files++; i.Hardlinks-- }, file("f", "")), "other bytes": craft(t, func(i *Index) { i.Bytes++ }, file("f", "")), "another format": craft(t, func(i *Index) { i.Format = 2 }), "another digest": craft(t, func(i *Index) { i.SHA256 = strings.Repeat("0", 64) }),
		"no digest": craft(t, func(i *Index) { i.SHA256 = "" }),
	} {
		b.processes.calls = nil
		w := b.restore(archive, plenty)
		if w.Code != 400 || !strings.Contains(w.Body.String(), "invalid_archive") {
			t.Errorf("%s: %d %s", name, w.Code, w.Body)
		}
		if calls := b.processes.seen(); calls != "freeze thaw" {
			t.Errorf("%s: %s", name, calls)
		}
		same(t, name, before, all())
	}
}

func craftWithoutIndex(t testing.TB) []byte {
	var out bytes.Buffer
	w := tarfmt.NewWriter(&out)
	must(t, errors.Join(w.WriteFile(manifestName, []byte("{}")), w.WriteFile("f", []byte("x")), w.Close()))
	return out.Bytes()
}

func TestBombsAndWhatDoesNotFitAreRefused(t *testing.T) {
	b := newBox(t)
	must(t, os.WriteFile(b.work+"/old", nil, 0o644))
	before := describe(t, b.work)
	archive := craft(t, nil, file("a", strings.Repeat("x", 100_000)), file("b", "y"))
	var fs unix.Statfs_t
	must(t, unix.Statfs(b.work, &fs))
	free := int64(fs.Bavail) * fs.Bsize
	for query, status := range map[string]int{
		"bytes=100000&entries=2&max_bytes=1000000": 400, "bytes=100001&entries=1&max_bytes=1000000": 400, "bytes=100001&entries=2&max_bytes=50000": 413,
		fmt.Sprintf("bytes=%d&entries=2&max_bytes=1000000", 2*free): 507, "bytes=1&entries=9000000000000000000&max_bytes=1000000": 507,
		"entries=2&max_bytes=1": 400, "bytes=-1&entries=2&max_bytes=1": 400, "bytes=x&entries=2&max_bytes=1": 400,
	} {
		w := b.restore(archive, query)
		if w.Code != status {
			t.Errorf("%s: %d %s", query, w.Code, w.Body)
		}
		if status == 507 && fs.Files > 0 && !strings.Contains(w.Body.String(), "9000000000000000000") && !strings.Contains(w.Body.String(), fmt.Sprint(2*free)) {
			t.Errorf("%s: no numbers: %s", query, w.Body)
		}
		same(t, query, before, describe(t, b.work))
	}
	if w := b.restore(archive, "bytes=100001&entries=2&max_bytes=1000000"); w.Code != 200 {
		t.Errorf("exactly: %d %s", w.Code, w.Body)
	}
}

func TestAFullDiskAndAMountPointLeaveTheOldWorkspace(t *testing.T) {
	b := newBox(t)
	if err := unix.Mount("tmpfs", b.work, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	defer func() { _ = unix.Unmount(b.work, unix.MNT_DETACH) }()
	must(t, os.WriteFile(b.work+"/old", make([]byte, 600_000), 0o644))
	before := describe(t, b.work)
	archive := craft(t, nil, file("a", strings.Repeat("x", 600_000)))
	w := b.restore(archive, "bytes=600000&entries=1&max_bytes=1000000")
	if w.Code != 507 || !strings.Contains(w.Body.String(), "600000") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	same(t, "space", before, describe(t, b.work))
	// The check before knows what was announced only; here the folders need the rest.
	var folders []member
	for i := range 200 {
		folders = append(folders, folder(fmt.Sprint(i)), file(fmt.Sprintf("%d/f", i), strings.Repeat("x", 1500)))
	}
	if w := b.restore(craft(t, nil, folders...), "bytes=300000&entries=400&max_bytes=10000000"); w.Code != 507 || !strings.Contains(w.Body.String(), "300000") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	same(t, "full", before, describe(t, b.work))
	must(t, os.Mkdir(b.work+"/mounted", 0o755))
	must(t, unix.Mount("tmpfs", b.work+"/mounted", "tmpfs", 0, "size=1m"))
	must(t, os.WriteFile(b.work+"/mounted/f", nil, 0o644))
	before = describe(t, b.work)
	if index := indexOf(t, b.archive()); index.Skipped != 1 {
		t.Errorf("%+v", index)
	}
	b.processes.calls = nil
	if w := b.restore(craft(t, nil), "bytes=0&entries=0&max_bytes=10000"); w.Code != 409 || !strings.Contains(w.Body.String(), "mounted") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	same(t, "mount point", before, describe(t, b.work))
	if calls := b.processes.seen(); calls != "freeze thaw" {
		t.Error(calls)
	}
}

func TestAFailingFreezeOrKillLeavesEverything(t *testing.T) {
	for call, want := range map[string]string{"freeze": "freeze", "kill": "freeze kill thaw"} {
		b := newBox(t)
		build(t, b.work)
		before := describe(t, b.work)
		b.processes.fail = call
		if w := b.restore(craft(t, nil, file("new", "")), plenty); w.Code != 500 {
			t.Errorf("%s: %d %s", call, w.Code, w.Body)
		}
		same(t, call, before, describe(t, b.work))
		if calls := b.processes.seen(); calls != want {
			t.Errorf("%s: %s", call, calls)
		}
	}
}

func TestARestoreWhoseChannelDiesOrStallsLeavesEverything(t *testing.T) {
	archive := craft(t, nil, file("a", strings.Repeat("x", 1<<20)))
	for _, name := range []string{"dies", "stalls"} {
		b := newBox(t)
		must(t, os.WriteFile(b.work+"/old", []byte("old"), 0o644))
		before := describe(t, b.work)
		b.handler.in.stall = 200 * time.Millisecond
		conn := b.serve()
		_, err := fmt.Fprintf(conn, "POST /v1/restore?%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", plenty, len(archive), archive[:len(archive)/2])
		must(t, err)
		if name == "dies" {
			must(t, conn.(*net.UnixConn).CloseWrite())
		}
		reply := make([]byte, 4096)
		n, err := conn.Read(reply)
		must(t, err)
		if status := string(reply[9:12]); status != "400" && status != "500" || (name == "stalls" && !bytes.Contains(reply[:n], []byte("stood still"))) {
			t.Errorf("%s: %s", name, reply[:n])
		}
		b.waitForThaw()
		same(t, name, before, describe(t, b.work))
	}
}

func TestWhatTheUserPutUnderTheReservedNameIsNoObstacle(t *testing.T) {
	archive := craft(t, nil, file("new", "n"))
	for name, make := range map[string]func(path string) error{
		"a file": func(path string) error { return os.WriteFile(path, nil, 0o000) },
		"a link": func(path string) error { return os.Symlink("/etc", path) },
		"a tree": func(path string) error {
			return errors.Join(os.MkdirAll(path+"/new/deep", 0o755), os.Symlink("..", path+"/old"), os.WriteFile(path+"/swap", nil, 0o644), os.Chmod(path, 0o500))
		},
	} {
		b := newBox(t)
		must(t, make(b.work+"/"+tree.Reserved))
		if list, _ := members(t, b.archive()); len(list) != 2 {
			t.Errorf("%s is in the archive", name)
		}
		if w := b.restore(archive, plenty); w.Code != 200 {
			t.Errorf("%s: %d %s", name, w.Code, w.Body)
		}
		if got := describe(t, b.work); len(got) != 1 {
			t.Errorf("%s: %v", name, got)
		}
		must(t, make(b.work+"/"+tree.Reserved))
		must(t, Recover(b.work))
		if got := describe(t, b.work); len(got) != 1 {
			t.Errorf("%s after Recover: %v", name, got)
		}
	}
}

func TestLostFoundAndTheTopsModeStay(t *testing.T) {
	b := newBox(t)
	must(t, os.Mkdir(b.work+"/"+tree.LostFound, 0o700))
	must(t, os.WriteFile(b.work+"/"+tree.LostFound+"/x", nil, 0o600))
	must(t, os.Chmod(b.work, 0o775|os.ModeSetgid))
	b.mustRestore(craft(t, nil, folder("d"), file("d/f", "x")))
	got := describe(t, b.work)
	if len(got) != 4 || !strings.HasPrefix(got["d"], "40755 ") {
		t.Errorf("%v", got)
	}
	if fi, _ := os.Stat(b.work); fi.Mode() != os.ModeDir|os.ModeSetgid|0o775 {
		t.Errorf("the top has mode %v", fi.Mode())
	}
}

func inodeOf(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Lstat(path, &st))
	return st.Ino
}

func TestARestoreWritesOnlyWhatHasChangedAndSeesEveryChange(t *testing.T) {
	b := newBox(t)
	content := strings.Repeat("0123456789abcdef", 40_000)
	for _, name := range []string{"kept", "first byte", "last byte", "time", "mode", "attribute", "longer", "linked", "replaced", "gone"} {
		must(t, os.MkdirAll(b.work+"/d/"+name, 0o755))
		must(t, os.WriteFile(b.work+"/d/"+name+"/f", []byte(content), 0o644))
	}
	must(t, os.WriteFile(b.work+"/empty", nil, 0o644))
	want := describe(t, b.work)
	archive := b.archive()
	inodes := map[string]uint64{}
	for name := range want {
		inodes[name] = inodeOf(t, b.work+"/"+name)
	}
	// All of these are done behind the back of size and time.
	change := func(name string, f func(path string) error) {
		path := b.work + "/d/" + name + "/f"
		fi, err := os.Stat(path)
		must(t, errors.Join(err, f(path)))
		if name != "time" && name != "gone" && name != "replaced" {
			must(t, os.Chtimes(path, fi.ModTime(), fi.ModTime()))
		}
	}
	poke := func(at int64) func(string) error {
		return func(path string) error {
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			must(t, err)
			_, err = f.WriteAt([]byte("X"), at)
			return errors.Join(err, f.Close())
		}
	}
	change("first byte", poke(0))
	change("last byte", poke(int64(len(content)-1)))
	change("longer", poke(int64(len(content))))
	change("time", func(path string) error { return os.Chtimes(path, time.Now(), time.Now()) })
	change("mode", func(path string) error { return os.Chmod(path, 0o600) })
	change("attribute", func(path string) error { return unix.Setxattr(path, "user.new", []byte("x"), 0) })
	change("linked", func(path string) error { return os.Link(path, b.work+"/other name") })
	change("gone", os.Remove)
	change("replaced", func(path string) error { return errors.Join(os.Remove(path), os.Symlink("../kept/f", path)) })
	b.mustRestore(archive)
	same(t, "after the restore", want, describe(t, b.work))
	for _, name := range []string{"empty", "d/kept/f"} {
		if inodeOf(t, b.work+"/"+name) != inodes[name] {
			t.Errorf("%s was written again", name)
		}
	}
	for _, name := range []string{"first byte", "last byte", "longer", "time", "mode", "attribute", "linked"} {
		if inodeOf(t, b.work+"/d/"+name+"/f") == inodes["d/"+name+"/f"] {
			t.Errorf("the change of %s was not seen", name)
		}
	}
	before := describe(t, b.work)
	damaged := bytes.Clone(archive)
	damaged[len(damaged)-1024-600] ^= 1 // in the index, so that everything was unpacked
	if w := b.restore(damaged, plenty); w.Code != 400 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	same(t, "after a restore that was refused", before, describe(t, b.work))
}

func TestSysVObjectsOfTheSandboxAreRemoved(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the namespace ends with the thread
		if err := unix.Unshare(unix.CLONE_NEWIPC); err != nil {
			t.Errorf("no new IPC namespace: %v", err)
			return
		}
		_, _, e1 := unix.Syscall(unix.SYS_SHMGET, 1, 4096, unix.IPC_CREAT)
		_, _, e2 := unix.Syscall(unix.SYS_SEMGET, 2, 3, unix.IPC_CREAT|0o600)
		_, _, e3 := unix.Syscall(unix.SYS_MSGGET, 3, unix.IPC_CREAT|0o600, 0)
		if e1|e2|e3 != 0 {
			t.Errorf("%v %v %v", e1, e2, e3)
		}
		count := func() (n int) {
			for _, kind := range []string{"shm", "sem", "msg"} {
				ids, err := listIPC(kind)
				if err != nil {
					t.Error(err)
				}
				n += len(ids)
			}
			return n
		}
		if n := count(); n != 3 {
			t.Errorf("%d objects made", n)
		}
		if err := removeIPC(); err != nil {
			t.Error(err)
		}
		if n := count(); n != 0 {
			t.Errorf("%d objects left", n)
		}
	}()
	<-done
}

func FuzzARestoreNeverWritesOutside(f *testing.F) {
	f.Add("a", "b", "../x", byte('0'), byte('2'))
	f.Add("l", "l/x", "..", byte('2'), byte('0'))
	f.Add("d", "d/h", "d", byte('5'), byte('1'))
	dir := f.TempDir()
	must(f, errors.Join(os.Mkdir(dir+"/guard", 0o755), os.Mkdir(dir+"/guard/work", 0o755)))
	f.Fuzz(func(t *testing.T, first, second, target string, kind1, kind2 byte) {
		var out bytes.Buffer
		w := tarfmt.NewWriter(&out)
		must(t, w.WriteFile(manifestName, []byte("{}")))
		for _, h := range []tarfmt.Header{{Name: first, Type: tarfmt.Type(kind1), Mode: 0o700, Linkname: target}, {Name: second, Type: tarfmt.Type(kind2), Mode: 0o700, Linkname: target}} {
			if h.Type == tarfmt.File || h.Type == tarfmt.Directory {
				h.Linkname = ""
			}
			if w.WriteHeader(&h) != nil {
				return
			}
		}
		if w.Close() != nil {
			return
		}
		r, err := openRoot(dir+"/guard/work", uint32(os.Getuid()))
		must(t, err)
		defer r.close()
		s, err := newStaging(r, func(string) {})
		must(t, err)
		defer s.close()
		u := &unpacker{root: r, in: tarfmt.NewReader(&out), want: limits{1 << 20, 10, 1 << 20}, watch: &watch{}}
		if err := u.run(s.new); err == nil {
			t.Error("an archive without index passed")
		}
		s.discard()
		if entries, err := os.ReadDir(dir + "/guard"); err != nil || len(entries) != 1 {
			t.Fatalf("%q %q %q wrote outside: %v", first, second, target, entries)
		}
		if entries, err := os.ReadDir(dir + "/guard/work"); err != nil || len(entries) != 0 {
			t.Fatalf("%q %q %q left %v", first, second, target, entries)
		}
	})
}
