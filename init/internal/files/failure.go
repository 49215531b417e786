package files

import (
	"errors"
	"fmt"
	"net/http"

	"agentsandbox.dev/init/internal/apierr"
	"golang.org/x/sys/unix"
)

// shown is a path as it appears in messages: quoted, and cut where it is very long.
func shown(path string) string {
	const longest = 300
	if len(path) > longest {
		return fmt.Sprintf("%q…", path[:longest])
	}
	return fmt.Sprintf("%q", path)
}

// failure turns what the kernel said about a path into an error of the API; errors of the API pass.
func failure(path string, err error) error {
	var known *apierr.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return fmt.Errorf("%s: %w", shown(path), err)
	}
	p := shown(path)
	switch errno {
	case unix.ENOENT:
		return apierr.NotFound("%s does not exist", p)
	case unix.EACCES, unix.EPERM:
		return forbidden("%s is closed to the sandbox's user: check the modes of it and of its folders", p)
	case unix.EROFS:
		return forbidden("%s is on a read-only file system: write below the workspace", p)
	case unix.ENOTDIR:
		return apierr.Invalid("%s leads through something that is no directory: check each part of the path", p)
	case unix.ELOOP:
		return apierr.Invalid("%s leads through too many links or a link in a circle", p)
	case unix.ENAMETOOLONG:
		return apierr.Invalid("%s is too long: a name has at most 255 bytes, a path 4095", p)
	case unix.EINVAL, unix.EILSEQ:
		return apierr.Invalid("%s is a name that this file system does not allow, or a directory moved into itself", p)
	case unix.EISDIR:
		return apierr.Invalid("%s is a directory: name a file", p)
	case unix.EXDEV:
		return apierr.Invalid("%s is on another file system: write it again there and remove the old one", p)
	case unix.EEXIST:
		return apierr.Conflict("%s exists already", p)
	case unix.ENOTEMPTY:
		return apierr.Conflict("%s is a directory that is not empty: remove it with recursive=1", p)
	case unix.EBUSY, unix.ETXTBSY:
		return apierr.Conflict("%s is in use as a mount point or a program: nothing was changed", p)
	case unix.ENOSPC, unix.EDQUOT:
		return apierr.New(http.StatusInsufficientStorage, "no_space", "no space is left for %s: remove files or use a larger workspace", p)
	case unix.EFBIG:
		return apierr.New(http.StatusRequestEntityTooLarge, "payload_too_large", "%s would be larger than the file system allows", p)
	}
	return fmt.Errorf("%s: %w", p, errno)
}

func forbidden(format string, args ...any) error {
	return apierr.New(http.StatusForbidden, "forbidden", format, args...)
}
