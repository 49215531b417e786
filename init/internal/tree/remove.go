package tree

import (
	"fmt"
	"hash/fnv"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// maxDepth bounds the descriptors that a removal holds: what lies deeper is moved up first.
const maxDepth = 64

const dirFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK

// Remove removes a name and all that is below it, without following links, however deep it is and whatever its modes are. A missing name is fine.
// It does not leave the mount: a mount point below is an error.
func Remove(dir int, name string) error {
	err := unlink(dir, name, 0)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	if err != unix.EISDIR && err != unix.EPERM && err != unix.EACCES {
		return named(name, err)
	}
	fd, opened := openForRemoval(dir, name)
	if opened != nil {
		if opened == unix.ENOTDIR || opened == unix.ELOOP {
			return named(name, err) // no directory: what unlink said is the reason
		}
		return named(name, opened)
	}
	err = Empty(fd, nil)
	_ = unix.Close(fd)
	if err != nil {
		return err
	}
	return named(name, unlink(dir, name, unix.AT_REMOVEDIR))
}

// Empty removes what is in an open directory but the names that keep holds back (nil: none).
func Empty(dir int, keep func(name string) bool) error {
	r := remover{top: dir, keep: keep}
	if err := r.empty(dir, 0); err != nil {
		return err
	}
	for r.moved > 0 {
		// What was too deep is at the top now, under names that nothing else can have been given meanwhile.
		r.moved = 0
		if err := r.empty(dir, 0); err != nil {
			return err
		}
	}
	return nil
}

// Shred is Empty for a large tree: several walks remove the files first, each its share of the names. Where freeing a file's blocks waits for the
// disk (a discard for every file, on some), the waits overlap. It blocks as many threads as there are walks.
func Shred(dir, walks int) error {
	var group sync.WaitGroup
	for share := range walks {
		group.Go(func() {
			fd, err := Open(dir, ".", dirFlags, 0) // the place in a directory belongs to the descriptor
			if err != nil {
				return
			}
			shredShare(fd, 0, uint32(share), uint32(walks))
			_ = unix.Close(fd)
		})
	}
	group.Wait()
	return Empty(dir, nil) // the directories, and whatever a walk could not do
}

// shredShare removes the files below dir whose names are in a share. It reports nothing: what stays is met again by Empty.
func shredShare(dir, depth int, share, of uint32) {
	_ = scan(dir, func(raw []byte, kind uint8) error {
		if kind != unix.DT_DIR {
			sum := fnv.New32a()
			_, _ = sum.Write(raw)
			if sum.Sum32()%of != share {
				return nil
			}
			if unlink(dir, string(raw), 0) == unix.EACCES && unix.Fchmod(dir, 0o700) == nil {
				_ = unlink(dir, string(raw), 0)
			}
			return nil
		}
		if depth >= maxDepth {
			return nil
		}
		if fd, err := openForRemoval(dir, string(raw)); err == nil {
			shredShare(fd, depth+1, share, of)
			_ = unix.Close(fd)
		}
		return nil
	})
}

type remover struct {
	top    int
	keep   func(name string) bool
	moved  int
	serial int
}

// empty removes the entries of dir; it reads again until nothing is left, since removing moves what a reader sees.
func (r *remover) empty(dir, depth int) error {
	for {
		if _, err := unix.Seek(dir, 0, unix.SEEK_SET); err != nil {
			return err
		}
		removed, movedBefore := 0, r.moved
		err := scan(dir, func(raw []byte, kind uint8) error {
			name := string(raw)
			if depth == 0 && r.keep != nil && r.keep(name) {
				return nil
			}
			removed++
			return r.remove(dir, name, kind, depth)
		})
		if err != nil || removed == 0 {
			return err
		}
		if depth == 0 && r.moved > movedBefore {
			return nil
		}
	}
}

func (r *remover) remove(dir int, name string, kind uint8, depth int) error {
	if kind != unix.DT_DIR {
		err := unlink(dir, name, 0)
		if err == unix.EACCES && unix.Fchmod(dir, 0o700) == nil {
			err = unlink(dir, name, 0)
		}
		if err == nil || err == unix.ENOENT {
			return nil
		}
		if err != unix.EISDIR && !(err == unix.EPERM && kind == unix.DT_UNKNOWN) {
			return named(name, err)
		}
	}
	err := unlink(dir, name, unix.AT_REMOVEDIR) // an empty directory needs no more
	if err == unix.EACCES && unix.Fchmod(dir, 0o700) == nil {
		err = unlink(dir, name, unix.AT_REMOVEDIR)
	}
	if err == nil || err == unix.ENOENT {
		return nil
	}
	if err != unix.ENOTEMPTY && err != unix.EEXIST {
		return named(name, err)
	}
	fd, err := openForRemoval(dir, name)
	if err != nil {
		return named(name, err)
	}
	defer func() { _ = unix.Close(fd) }()
	if depth >= maxDepth {
		return r.lift(dir, name, fd)
	}
	if err := r.empty(fd, depth+1); err != nil {
		return err
	}
	if err := unlink(dir, name, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
		return named(name, err)
	}
	return nil
}

// lift moves a directory that lies too deep to the top, to be removed from there.
func (r *remover) lift(dir int, name string, fd int) error {
	if err := unix.Fchmod(fd, 0o700); err != nil { // its ".." entry changes
		return named(name, err)
	}
	for {
		r.serial++
		target := temporaryPrefix + "deep-" + strconv.Itoa(r.serial)
		err := unix.Renameat2(dir, name, r.top, target, unix.RENAME_NOREPLACE)
		if err == unix.EINVAL || err == unix.ENOSYS {
			err = unix.Renameat(dir, name, r.top, target) // onto a directory that is not empty it fails with ENOTEMPTY
		}
		switch err {
		case nil:
			r.moved++
			return nil
		case unix.EEXIST, unix.ENOTEMPTY, unix.ENOTDIR:
			continue
		default:
			return named(name, err)
		}
	}
}

// openForRemoval opens a directory so that its entries can be removed, and gives it the mode that this needs.
func openForRemoval(dir int, name string) (int, error) {
	fd, err := Open(dir, name, dirFlags, 0)
	if err == unix.EACCES {
		if chmod := Chmod(dir, name, 0o700); chmod != nil {
			return -1, err
		}
		fd, err = Open(dir, name, dirFlags, 0)
	}
	if err != nil {
		return -1, err
	}
	// Without search permission the entries cannot be reached although their names can be read.
	if st, err := Stat(fd, ""); err == nil && st.Mode&0o700 != 0o700 {
		_ = unix.Fchmod(fd, 0o700)
	}
	return fd, nil
}

func unlink(dir int, name string, flags int) error {
	for {
		err := unix.Unlinkat(dir, name, flags)
		if err != unix.EINTR {
			return err
		}
	}
}

func named(name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%q: %w", name, err)
}
