package archive

import (
	"slices"
	"strings"

	"agentsandbox.dev/init/internal/tarfmt"
	"golang.org/x/sys/unix"
)

// xattrs reads the extended attributes of open files, with one buffer.
type xattrs struct {
	none bool // this file system has none
	buf  []byte
}

// read returns the user.* attributes of an open file in the order of their names. acl says that it has an access control list, which an archive
// does not hold.
func (x *xattrs) read(fd int) (list []tarfmt.Xattr, acl bool, err error) {
	if x.none {
		return nil, false, nil
	}
	names, err := x.call(func(b []byte) (int, error) { return unix.Flistxattr(fd, b) })
	if err == unix.ENOTSUP || err == unix.ENOSYS {
		x.none = true
		return nil, false, nil
	}
	if err != nil || names == "" {
		return nil, false, err
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(names, "\x00"), "\x00") {
		acl = acl || strings.HasPrefix(name, "system.posix_acl_")
		if !strings.HasPrefix(name, "user.") {
			continue
		}
		value, err := x.call(func(b []byte) (int, error) { return unix.Fgetxattr(fd, name, b) })
		if err == unix.ENODATA {
			continue
		}
		if err != nil {
			return nil, acl, err
		}
		list = append(list, tarfmt.Xattr{Name: name, Value: value})
	}
	slices.SortFunc(list, func(a, b tarfmt.Xattr) int { return strings.Compare(a.Name, b.Name) })
	return list, acl, nil
}

// call calls read with a buffer that grows until the answer fits.
func (x *xattrs) call(read func([]byte) (int, error)) (string, error) {
	if x.buf == nil {
		x.buf = make([]byte, 1<<10)
	}
	for {
		n, err := read(x.buf)
		if err == unix.ERANGE && len(x.buf) < tarfmt.MaxHeader {
			x.buf = make([]byte, 4*len(x.buf))
			continue
		}
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return "", err
		}
		return string(x.buf[:n]), nil
	}
}
