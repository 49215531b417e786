package archive

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"agentsandbox.dev/init/internal/tarfmt"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

// The kill tests run this binary again: it restores, and dies by SIGKILL before its nth step.
const (
	childWork = "RESTORE_CHILD_WORK"
	childStep = "RESTORE_CHILD_STEP"
	childFile = "RESTORE_CHILD_ARCHIVE"
)

func TestMain(m *testing.M) {
	if work := os.Getenv(childWork); work != "" {
		os.Exit(child(work))
	}
	os.Exit(m.Run())
}

// child restores an archive, or recovers when there is none, and dies at its step. Exit code 0: there are not so many steps.
func child(work string) int {
	var left int
	_, _ = fmt.Sscan(os.Getenv(childStep), &left)
	step := func(string) {
		if left--; left < 0 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	runtime.LockOSThread()
	r, err := openRoot(work, 1000)
	if err != nil {
		return 2
	}
	if os.Getuid() == 0 {
		_ = unix.Setfsuid(1000)
	}
	path := os.Getenv(childFile)
	if path == "" {
		if err := recoverRoot(r, step); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 2
		}
		return 0
	}
	archive, err := os.Open(path)
	if err != nil {
		return 2
	}
	s, err := newStaging(r, step)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	step("unpack")
	w := &watch{}
	u := &unpacker{root: r, in: tarfmt.NewReader(archive), want: limits{1 << 40, 1 << 20, 1 << 40}, watch: w}
	err = u.run(s.new)
	s.unpacked = u.closed
	step("prepare")
	if err == nil {
		err = s.prepare()
	}
	if err == nil {
		err = s.swap()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	return 0
}

// runChild says whether the child died at its step.
func runChild(t *testing.T, work, archive string, step int) (died bool) {
	t.Helper()
	executable, err := os.Executable()
	must(t, err)
	command := exec.Command(executable)
	command.Env = append(os.Environ(), childWork+"="+work, childFile+"="+archive, childStep+"="+fmt.Sprint(step))
	var stderr bytes.Buffer
	command.Stderr = &stderr
	err = command.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
		return true
	}
	if err != nil {
		t.Fatalf("step %d: %v %s", step, err, stderr.String())
	}
	return false
}

// small makes a tree with all that matters for the exchange, in few entries.
func small(t *testing.T, dir, which string) {
	t.Helper()
	must(t, os.MkdirAll(dir+"/both/in", 0o755))
	must(t, os.WriteFile(dir+"/both/in/f", []byte(which), 0o644))
	must(t, os.Mkdir(dir+"/"+which+" closed", 0o755))
	must(t, os.WriteFile(dir+"/"+which+" closed/f", []byte(which), 0o400))
	must(t, os.Symlink(which, dir+"/link"))
	must(t, os.WriteFile(dir+"/"+which, []byte(which), 0o600))
	for _, name := range []string{dir + "/shared", dir + "/both/in/shared"} {
		must(t, os.WriteFile(name, []byte("the same in both"), 0o644))
		must(t, os.Chtimes(name, time.Unix(1, 5), time.Unix(1, 5)))
	}
	must(t, os.Chmod(dir+"/"+which+" closed", map[string]os.FileMode{"old": 0o500, "new": 0o000}[which]))
	must(t, os.Chmod(dir+"/both", 0o555))
	must(t, filepath.Walk(dir, func(path string, _ os.FileInfo, err error) error {
		return errors.Join(err, os.Lchown(path, 1000, 1000))
	}))
}

func TestARestoreKilledAtAnyStepIsCompletedOrUndone(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	b := newBox(t)
	b.asUser(func() { asRoot(func() int { small(t, b.work, "new"); return 0 }) })
	fresh := describe(t, b.work)
	archivePath := b.tmp + "/a.tar"
	b.asUser(func() {
		archive := b.archive()
		asRoot(func() error { return os.WriteFile(archivePath, archive, 0o644) })
	})
	seen := map[string]int{}
	for step, died := 0, true; died; step++ {
		c := newBox(t)
		c.asUser(func() { asRoot(func() int { small(t, c.work, "old"); return 0 }) })
		before := describe(t, c.work)
		if died = runChild(t, c.work, archivePath, step); died {
			// Also the recovery is killed, at a step that changes from run to run, before one that is not.
			runChild(t, c.work, "", step%7)
			runChild(t, c.work, "", 1000)
		}
		got := describe(t, c.work)
		switch {
		case maps.Equal(got, fresh):
			seen["new"]++
		case maps.Equal(got, before):
			seen["old"]++
		default:
			same(t, fmt.Sprintf("killed at step %d, as the new tree", step), fresh, got)
			same(t, fmt.Sprintf("killed at step %d, as the old tree", step), before, got)
		}
	}
	if seen["old"] < 2 || seen["new"] < 10 {
		t.Errorf("%v", seen)
	}
}

func TestAnExchangeThatFailsHalfWayIsUndone(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	for _, name := range []string{"out", "in"} {
		b := newBox(t)
		b.asUser(func() {
			asRoot(func() int { small(t, b.work, "old"); return 0 })
			before := asRoot(func() map[string]string { return describe(t, b.work) })
			moves, made := 0, false
			b.handler.step = func(step string) {
				// A mount point cannot be moved: one appears under an entry's name when its turn comes.
				if moves++; step == "move" && !made && (name == "in") == (moves > 7) && moves > 3 {
					made = true
					entry := map[string]string{"out": b.work + "/old", "in": b.work + "/" + tree.Reserved + "/new/zz"}[name]
					asRoot(func() error { return unix.Mount(entry, entry, "", unix.MS_BIND, "") })
				}
			}
			w := b.restore(craft(t, nil, folder("aa"), file("zz", "")), plenty)
			asRoot(func() int {
				for _, entry := range []string{b.work + "/old", b.work + "/zz", b.work + "/" + tree.Reserved + "/new/zz"} {
					_ = unix.Unmount(entry, unix.MNT_DETACH)
				}
				return 0
			})
			if w.Code != 500 || !made {
				t.Errorf("%s: %d %s", name, w.Code, w.Body)
			}
			must(t, asRoot(func() error { return Recover(b.work) }))
			same(t, name, before, asRoot(func() map[string]string { return describe(t, b.work) }))
			if calls := b.processes.seen(); calls != "freeze kill reset thaw" {
				t.Errorf("%s: %s", name, calls)
			}
		})
	}
}
