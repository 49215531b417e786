package archive

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

// The exchange of a workspace. It is a mount and cannot be renamed, so its entries are moved one by one, within two steps that a mark on disk names:
//
//	no mark   what is at the top is old, whole, and in force; the staging folder is nothing yet
//	swap      what is at the top is old; entries move from the top to old/
//	install   what is at the top is new; entries move from new/ to the top
//	no mark   what is at the top is new, whole, and in force
//
// In each step it is clear from where an entry is what it belongs to, so both directions can go on from any point: forward (Recover, since the new
// tree is complete and on disk before the first mark) and back (when a move fails).
const (
	oldName     = "old"
	newName     = "new"
	modesName   = "modes" // of folders at the top that lack write permission: without it they cannot be moved
	markSwap    = "swap"
	markInstall = "install"
)

// removalWalks is how many threads the removal of the old tree takes. All other calls are refused meanwhile, so theirs are free.
const removalWalks = 4

// staging is the reserved folder during a restore.
type staging struct {
	root     *root
	fd       int // .sandbox-init
	old, new int
	unpacked []closed
	step     func(name string) // called before each step; tests die in it
}

// newStaging makes the folder. What has its name was removed before; what was made under it until the processes were frozen goes now.
func newStaging(r *root, step func(string)) (*staging, error) {
	s := &staging{root: r, fd: -1, old: -1, new: -1, step: step}
	err := unix.Mkdirat(r.fd, tree.Reserved, 0o700)
	if err == unix.EEXIST {
		if err = tree.Remove(r.fd, tree.Reserved); err == nil {
			err = unix.Mkdirat(r.fd, tree.Reserved, 0o700)
		}
	}
	if err != nil {
		return nil, stagingFailure(err)
	}
	err = s.open(r.fd)
	for _, name := range []string{oldName, newName} {
		if err == nil {
			err = unix.Mkdirat(s.fd, name, 0o700)
		}
	}
	if err == nil {
		err = s.openTrees()
	}
	if err != nil {
		s.discard()
		s.close()
		return nil, stagingFailure(err)
	}
	return s, nil
}

func stagingFailure(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return noSpace("the workspace has no room for the folder of a restore: remove files or use a larger workspace")
	}
	return fmt.Errorf("the workspace takes no folder for the restore: %w", err)
}

// open opens the folder itself: never a link, and ours.
func (s *staging) open(top int) (err error) {
	if s.fd, err = tree.Open(top, tree.Reserved, folderFlags, 0); err != nil {
		return err
	}
	st, err := tree.Stat(s.fd, "")
	if err != nil {
		return err
	}
	if st.Uid != s.root.uid {
		return unix.EPERM
	}
	return unix.Fchmod(s.fd, 0o700)
}

func (s *staging) openTrees() (err error) {
	if s.old, err = tree.Open(s.fd, oldName, folderFlags, 0); err == nil {
		s.new, err = tree.Open(s.fd, newName, folderFlags, 0)
	}
	return err
}

func (s *staging) close() {
	for _, fd := range []int{s.fd, s.old, s.new} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// discard removes the folder and all that is in it. What cannot be removed goes at the next start or restore; it is never seen through the API.
func (s *staging) discard() { _ = tree.Remove(s.root.fd, tree.Reserved) }

// isKept tells which names at the top are no part of the workspace's content.
func isKept(name string) bool { return name == tree.Reserved || name == tree.LostFound }

// prepare does all that can fail or take long before anything is moved: it checks that the entries can be moved, writes the modes, and brings
// everything to the disk.
func (s *staging) prepare() error {
	fd, err := tree.Open(s.fd, modesName, createFlags, 0o600)
	if err != nil {
		return stagingFailure(err)
	}
	file := os.NewFile(uintptr(fd), modesName)
	w := bufio.NewWriter(file)
	err = tree.Each(s.root.fd, func(e tree.Entry) error {
		if isKept(e.Name) {
			return nil
		}
		st, err := tree.Stat(s.root.fd, e.Name)
		if err != nil {
			return fmt.Errorf("%q cannot be examined: %w", e.Name, err)
		}
		if !tree.SameMount(&st, &s.root.stat) || st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 {
			return apierr.Conflict("%.300q is a mount point in the workspace, which cannot be replaced: nothing was changed", e.Name)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Mode&0o200 == 0 {
			writeMode(w, oldName, uint32(st.Mode&0o7777), e.Name)
		}
		return nil
	})
	for _, c := range s.unpacked {
		if !strings.Contains(c.name, "/") {
			writeMode(w, newName, c.mode, c.name)
		}
	}
	if flushed := w.Flush(); err == nil && flushed != nil {
		err = stagingFailure(flushed)
	}
	if closed := file.Close(); err == nil && closed != nil {
		err = stagingFailure(closed)
	}
	if err != nil {
		return err
	}
	// Once for all files: an fsync of each would cost more than all the rest.
	if err := unix.Syncfs(s.fd); err != nil {
		return fmt.Errorf("the new files could not be brought to the disk, nothing was changed: %w", err)
	}
	return nil
}

func writeMode(w io.Writer, which string, mode uint32, name string) {
	_, _ = fmt.Fprintf(w, "%s %o %x\n", which, mode, name) // bufio keeps the error for Flush
}

// swap exchanges the trees. When it fails the old one is back.
func (s *staging) swap() error {
	err := s.mark("", markSwap)
	if err == nil {
		err = s.forward(markSwap)
	}
	if err == nil {
		s.step("discard")
		_ = tree.Shred(s.old, removalWalks) // what it cannot do, discard tries again
		s.discard()
		return nil
	}
	if back := s.back(); back != nil {
		return fmt.Errorf("the workspace could not be exchanged (%w) and not be put back (%w): both parts are kept in %s, restart the sandbox to try again", err, back, tree.Reserved)
	}
	s.discard()
	return fmt.Errorf("the workspace could not be exchanged and is as it was, but its processes were ended: %w", err)
}

// mark makes a mark, or turns one into the next, durably.
func (s *staging) mark(from, to string) error {
	s.step("mark " + from + " " + to)
	if from == "" {
		fd, err := tree.Open(s.fd, to, createFlags, 0o600)
		if err != nil {
			return err
		}
		_ = unix.Close(fd)
	} else if err := unix.Renameat(s.fd, from, s.fd, to); err != nil {
		return err
	}
	return syncFolder(s.fd)
}

// syncFolder brings the names in a folder to the disk, where the file system has a way to do that.
func syncFolder(fd int) error {
	err := unix.Fsync(fd)
	if err == unix.EINVAL || err == unix.ENOSYS || err == unix.EOPNOTSUPP {
		return nil
	}
	return err
}

// forward completes the exchange from the step that a mark names.
func (s *staging) forward(mark string) error {
	if mark == markSwap {
		if err := s.moveAll(s.root.fd, s.old); err != nil {
			return err
		}
		if err := s.mark(markSwap, markInstall); err != nil {
			return err
		}
	}
	if err := s.moveAll(s.new, s.root.fd); err != nil {
		return err
	}
	return s.conclude(newName, markInstall)
}

// back undoes the exchange from wherever it is.
func (s *staging) back() error {
	mark, err := s.marked()
	if err != nil || mark == "" {
		return err
	}
	if mark == markInstall {
		if err := s.moveAll(s.root.fd, s.new); err != nil {
			return err
		}
		if err := s.mark(markInstall, markSwap); err != nil {
			return err
		}
	}
	if err := s.moveAll(s.old, s.root.fd); err != nil {
		return err
	}
	return s.conclude(oldName, markSwap)
}

// conclude gives the folders at the top their modes and takes the mark away, when everything of before is on the disk.
func (s *staging) conclude(which, mark string) error {
	s.step("modes")
	if err := s.applyModes(which); err != nil {
		return err
	}
	if err := syncFolder(s.root.fd); err != nil {
		return err
	}
	s.step("unmark")
	return unix.Unlinkat(s.fd, mark, 0)
}

// marked says which mark there is.
func (s *staging) marked() (string, error) {
	for _, mark := range []string{markInstall, markSwap} {
		st, err := tree.Stat(s.fd, mark)
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
			return mark, nil
		}
		if err != nil && err != unix.ENOENT {
			return "", err
		}
	}
	return "", nil
}

// moveAll moves every entry of a folder to another.
func (s *staging) moveAll(from, to int) error {
	return tree.Each(from, func(e tree.Entry) error {
		if isKept(e.Name) {
			return nil
		}
		s.step("move")
		err := unix.Renameat(from, e.Name, to, e.Name)
		if err == unix.EACCES || err == unix.EPERM {
			// A folder that moves needs write permission on itself, for its "..". Its mode is in the list that prepare has made.
			if st, examined := tree.Stat(from, e.Name); examined == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Mode&0o200 == 0 {
				if err = tree.Chmod(from, e.Name, 0o700); err == nil {
					s.step("move after chmod")
					err = unix.Renameat(from, e.Name, to, e.Name)
				}
			}
		}
		if err != nil {
			return fmt.Errorf("%q could not be moved: %w", e.Name, err)
		}
		return nil
	})
}

// applyModes gives the folders at the top that lack write permission the modes that prepare has written.
func (s *staging) applyModes(which string) error {
	fd, err := tree.Open(s.fd, modesName, fileFlags, 0)
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), modesName)
	defer func() { _ = file.Close() }()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		var kind, name string
		var mode uint32
		if n, err := fmt.Sscanf(lines.Text(), "%s %o %x", &kind, &mode, &name); err != nil || n != 3 || mode > 0o7777 || strings.ContainsAny(name, "/\x00") {
			return fmt.Errorf("%s in %s is damaged", modesName, tree.Reserved)
		}
		if kind != which || isKept(name) || name == "." || name == ".." {
			continue
		}
		st, err := tree.Stat(s.root.fd, name)
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			err = tree.Chmod(s.root.fd, name, mode)
		}
		if err != nil && err != unix.ENOENT {
			return fmt.Errorf("mode of %q could not be set: %w", name, err)
		}
	}
	return lines.Err()
}

// Recover completes an exchange that init did not survive, or undoes it, and removes what else is in the reserved folder. Call it before the socket
// opens. An error means that the workspace is neither the old nor the new one: nothing may be served then.
func Recover(workspace string) error {
	r, err := openRoot(workspace, uint32(os.Geteuid()))
	if err != nil {
		return err
	}
	defer r.close()
	return recoverRoot(r, func(string) {})
}

func recoverRoot(r *root, step func(string)) error {
	s := &staging{root: r, fd: -1, old: -1, new: -1, step: step}
	defer s.close()
	// What the user made under this name (a file, a link, a folder without our parts) is no exchange of ours, and goes.
	if s.open(r.fd) == nil && s.openTrees() == nil {
		mark, err := s.marked()
		if err != nil {
			return fmt.Errorf("an interrupted restore cannot be examined: %w", err)
		}
		if mark != "" {
			if err := s.forward(mark); err != nil {
				if back := s.back(); back != nil {
					return fmt.Errorf("an interrupted restore could not be completed (%w) and not be undone (%w): both parts are kept in %s", err, back, tree.Reserved)
				}
			}
		}
	}
	step("discard")
	s.discard()
	return nil
}
