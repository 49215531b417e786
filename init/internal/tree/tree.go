// Package tree walks and removes directory trees by descriptors, never by path: what the sandboxed code renames or links meanwhile cannot lead a
// walk to another place. It also says which names of a workspace are init's own.
package tree

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Reserved is the name at the top of a workspace that belongs to init: it is never listed, archived or written through the API.
const Reserved = ".sandbox-init"

// LostFound is left alone at the top of a workspace: it belongs to the filesystem.
const LostFound = "lost+found"

const (
	temporaryPrefix = ".sandbox-init-"
	temporarySuffix = ".tmp"
	temporaryDigits = 32
)

// TemporaryName is the name of an upload in flight, where the filesystem has no files without a name: id is 16 random bytes.
func TemporaryName(id [temporaryDigits / 2]byte) string {
	return temporaryPrefix + hex.EncodeToString(id[:]) + temporarySuffix
}

// IsTemporary tells whether a name is one of TemporaryName: such files are never listed or archived.
func IsTemporary(name string) bool {
	if len(name) != len(temporaryPrefix)+temporaryDigits+len(temporarySuffix) || !strings.HasPrefix(name, temporaryPrefix) || !strings.HasSuffix(name, temporarySuffix) {
		return false
	}
	for _, c := range name[len(temporaryPrefix) : len(temporaryPrefix)+temporaryDigits] {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// Entry is a name in a directory; Kind is its DT_ type, DT_UNKNOWN where the filesystem does not say.
type Entry struct {
	Name string
	Kind uint8
}

// batch bounds the names that are in memory at once: a directory with a million names must not cost a sandbox of 16 MB its life.
const batch = 16 << 10

// Each calls f for every entry of an open directory but "." and "..", in byte order. A large directory is read several times.
func Each(dir int, f func(Entry) error) error {
	return each(dir, batch, f)
}

func each(dir, limit int, f func(Entry) error) error {
	after := ""
	for {
		entries, more, err := next(dir, after, limit)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := f(e); err != nil {
				return err
			}
		}
		if !more {
			return nil
		}
		after = entries[len(entries)-1].Name
	}
}

// next returns the first entries after a name, and whether there are more.
func next(dir int, after string, limit int) (entries []Entry, more bool, err error) {
	if _, err := unix.Seek(dir, 0, unix.SEEK_SET); err != nil {
		return nil, false, err
	}
	trim := func() {
		slices.SortFunc(entries, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
		if len(entries) > limit {
			clear(entries[limit:])
			entries, more = entries[:limit], true
		}
	}
	bound := ""
	err = scan(dir, func(name []byte, kind uint8) error {
		if string(name) <= after || (more && string(name) > bound) {
			return nil
		}
		entries = append(entries, Entry{string(name), kind})
		if len(entries) >= 2*limit {
			trim()
			bound = entries[len(entries)-1].Name
		}
		return nil
	})
	trim()
	return entries, more, err
}

// scan calls f for every entry but "." and "..", in the directory's own order; name is valid during the call.
func scan(dir int, f func(name []byte, kind uint8) error) error {
	const header = 19 // struct linux_dirent64: inode 8, offset 8, length 2, type 1
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.Getdents(dir, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return err
		}
		for b := buf[:n]; len(b) > header; {
			size := int(b[16]) | int(b[17])<<8
			if size <= header || size > len(b) {
				return errors.New("damaged directory entry")
			}
			name := b[header:size]
			if end := slices.Index(name, 0); end >= 0 {
				name = name[:end]
			}
			kind := b[18]
			b = b[size:]
			if s := string(name); s == "." || s == ".." || s == "" {
				continue
			}
			if err := f(name, kind); err != nil {
				return err
			}
		}
	}
}

// Stat is what is asked about a file, by descriptor (name "") or by name without following a link.
func Stat(dir int, name string) (unix.Statx_t, error) {
	var st unix.Statx_t
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_STATX_SYNC_AS_STAT
	if name == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	for {
		err := unix.Statx(dir, name, flags, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &st)
		if err != unix.EINTR {
			return st, err
		}
	}
}

// SameMount tells whether two files are on one mount: by mount id where the kernel gives it, else by device.
func SameMount(a, b *unix.Statx_t) bool {
	if a.Mask&b.Mask&unix.STATX_MNT_ID != 0 {
		return a.Mnt_id == b.Mnt_id
	}
	return a.Dev_major == b.Dev_major && a.Dev_minor == b.Dev_minor
}

// Open is openat that goes on after a signal.
func Open(dir int, name string, flags int, mode uint32) (int, error) {
	for {
		fd, err := unix.Openat(dir, name, flags|unix.O_CLOEXEC, mode)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// ErrMagicLink says that a path leads through a link of /proc that is no text but an open file: /proc/1/root, /proc/self/fd/3.
var ErrMagicLink = errors.New("a magic link")

// OpenPlain is Open for a path that must not lead through magic links: followed by init they show what is init's. Where the kernel, its seccomp
// filter or gVisor has no openat2, the check of the place that was reached has to do.
func OpenPlain(dir int, name string, flags int) (int, error) {
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Resolve: unix.RESOLVE_NO_MAGICLINKS}
	for {
		fd, err := unix.Openat2(dir, name, &how)
		switch err {
		case unix.EINTR, unix.EAGAIN:
			continue
		case unix.ENOSYS, unix.EPERM:
			return Open(dir, name, flags, 0)
		case unix.ELOOP:
			// A circle of links says so again without the rule.
			plain, again := Open(dir, name, flags, 0)
			if again != nil {
				return -1, again
			}
			_ = unix.Close(plain)
			return -1, ErrMagicLink
		}
		return fd, err
	}
}

// Self is the path that leads to an open descriptor, also to one of O_PATH.
func Self(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// Where tells the real path of a descriptor, as the kernel sees it now.
func Where(fd int) (string, error) {
	path, err := os.Readlink(Self(fd))
	if err != nil {
		return "", fmt.Errorf("place of an open file is unknown: %w", err)
	}
	return path, nil
}

// Chmod changes the mode of a file that is not a link, also of one that cannot be opened.
func Chmod(dir int, name string, mode uint32) error {
	fd, err := Open(dir, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	st, err := Stat(fd, "")
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return unix.ELOOP
	}
	return unix.Chmod(Self(fd), mode)
}
