package archive

import (
	"bytes"
	"io"
	"slices"

	"agentsandbox.dev/init/internal/tarfmt"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

// A rollback mostly brings back files that are there already. Such a file is not written again: when the present one at the same path has the same
// size, time, mode and attributes, its bytes are compared with those that come in, all of them, and when they are the same too the new tree gets a
// second name of it. So a rollback writes what has changed. Nothing here changes the file itself, so that the old tree stays what it was if the
// restore is given up.

// openSame opens the present file when all that can be seen from outside is as in the archive; -1 when not. Files with several names are left out
// (the names would stay tied together), and so are sparse ones.
func (u *unpacker) openSame(was int, name string, h *tarfmt.Header) int {
	if was < 0 || h.Sparse {
		return -1
	}
	fd, err := tree.Open(was, name, fileFlags, 0)
	if err != nil {
		return -1
	}
	if !u.looksSame(fd, h) {
		_ = unix.Close(fd)
		return -1
	}
	return fd
}

func (u *unpacker) looksSame(fd int, h *tarfmt.Header) bool {
	st, err := tree.Stat(fd, "")
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || uint32(st.Mode&0o7777) != h.Mode || int64(st.Size) != h.Size || st.Nlink != 1 ||
		st.Mtime.Sec != h.Seconds || int64(st.Mtime.Nsec) != h.Nanos || st.Uid != u.root.uid || !tree.SameMount(&st, &u.root.stat) {
		return false
	}
	attributes, acl, err := u.xattrs.read(fd)
	return err == nil && !acl && slices.Equal(attributes, h.Xattrs)
}

// readFull fills b from a file; fewer bytes are an error.
func readFull(fd int, b []byte, offset int64) error {
	for len(b) > 0 {
		n, err := unix.Pread(fd, b, offset)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return io.ErrUnexpectedEOF
		}
		b, offset = b[n:], offset+int64(n)
	}
	return nil
}

// equals tells whether the present file has these bytes at an offset. What cannot be read is not equal.
func (u *unpacker) equals(fd int, b []byte, offset int64) bool {
	if len(u.scratch) < len(b) {
		u.scratch = make([]byte, max(len(b), 64<<10))
	}
	have := u.scratch[:len(b)]
	return readFull(fd, have, offset) == nil && bytes.Equal(have, b)
}

// copyFrom writes the first n bytes of the present file, which were found equal, to the new one.
func (u *unpacker) copyFrom(same, fd int, n int64) error {
	for offset := int64(0); offset < n; {
		piece := u.scratch[:min(int64(len(u.scratch)), n-offset)]
		if err := readFull(same, piece, offset); err != nil {
			return err
		}
		if err := writeFull(fd, piece, offset); err != nil {
			return err
		}
		offset += int64(len(piece))
	}
	return nil
}

func writeFull(fd int, b []byte, offset int64) error {
	for len(b) > 0 {
		n, err := unix.Pwrite(fd, b, offset)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b, offset = b[n:], offset+int64(n)
	}
	return nil
}
