package tree

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, path string) int {
	t.Helper()
	fd, err := Open(unix.AT_FDCWD, path, dirFlags, 0)
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

func TestEntriesComeInByteOrderHoweverFewAreHeldAtOnce(t *testing.T) {
	dir := t.TempDir()
	var want []string
	for i := range 300 {
		name := fmt.Sprintf("%x\xff%d", i*7919%300, i)
		must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
		want = append(want, name)
	}
	slices.Sort(want)
	fd := open(t, dir)
	for _, limit := range []int{1, 7, 299, 300, 301, 1000} {
		var got []string
		must(t, each(fd, limit, func(e Entry) error {
			if e.Kind != unix.DT_REG && e.Kind != unix.DT_UNKNOWN {
				t.Errorf("%q has kind %d", e.Name, e.Kind)
			}
			got = append(got, e.Name)
			return nil
		}))
		if !slices.Equal(got, want) {
			t.Errorf("limit %d: %d entries of %d, or out of order", limit, len(got), len(want))
		}
	}
	stop := errors.New("stop")
	if err := Each(fd, func(Entry) error { return stop }); err != stop {
		t.Error(err)
	}
}

func TestATreeOfAnyDepthAndModeIsRemovedAndLinksAreNotFollowed(t *testing.T) {
	for name, remove := range map[string]func(dir int) error{
		"Remove": func(dir int) error { return Remove(dir, "tree") },
		"Empty":  func(dir int) error { return Empty(dir, func(name string) bool { return name == "kept" }) },
		"Shred": func(dir int) error {
			fd, err := Open(dir, "tree", dirFlags, 0)
			if err != nil {
				return err
			}
			defer func() { _ = unix.Close(fd) }()
			return errors.Join(Shred(fd, 3), Remove(dir, "tree"))
		},
	} {
		top := t.TempDir()
		must(t, os.Mkdir(top+"/kept", 0o755))
		must(t, os.WriteFile(top+"/kept/f", nil, 0o644))
		must(t, os.Mkdir(top+"/tree", 0o755))
		fd := open(t, top+"/tree")
		for i := range 5 * maxDepth {
			must(t, unix.Symlinkat(top+"/kept", fd, "link"))
			must(t, unix.Mkdirat(fd, "side", 0o755))
			must(t, unix.Mkdirat(fd, "deep", 0o755))
			next, err := Open(fd, "deep", dirFlags, 0)
			must(t, err)
			if i%3 == 0 {
				must(t, unix.Fchmodat(fd, "side", 0, 0))
			}
			if i > 0 {
				must(t, unix.Fchmod(fd, 0o500))
				_ = unix.Close(fd)
			}
			fd = next
		}
		_ = unix.Close(fd)
		must(t, remove(open(t, top)))
		entries, err := os.ReadDir(top)
		must(t, err)
		if len(entries) != 1 {
			t.Errorf("%s left %v", name, entries)
		}
		if _, err := os.Stat(top + "/kept/f"); err != nil {
			t.Errorf("%s followed a link", name)
		}
	}
	if err := Remove(open(t, t.TempDir()), "none"); err != nil {
		t.Error(err)
	}
}

func TestOnlyNamesOfUploadsInFlightAreTemporary(t *testing.T) {
	if !IsTemporary(TemporaryName([16]byte{1, 2, 3})) {
		t.Error("its own name is not known")
	}
	for _, name := range []string{"", Reserved, ".sandbox-init-.tmp", ".sandbox-init-0123456789abcdef0123456789abcdef", ".sandbox-init-0123456789abcdef0123456789abcdeF.tmp", ".sandbox-init-0123456789abcdef0123456789abcdef0.tmp"} {
		if IsTemporary(name) {
			t.Errorf("%q is taken for an upload", name)
		}
	}
}

func TestChmodDoesNotFollowALink(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/f", nil, 0o644))
	must(t, os.Symlink("f", dir+"/l"))
	if err := Chmod(open(t, dir), "l", 0o777); err == nil {
		t.Error("a link was followed")
	}
	must(t, Chmod(open(t, dir), "f", 0))
	if fi, _ := os.Stat(dir + "/f"); fi.Mode() != 0 {
		t.Errorf("mode %v", fi.Mode())
	}
}
