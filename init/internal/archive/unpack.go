package archive

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/tarfmt"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

const createFlags = unix.O_CREAT | unix.O_EXCL | unix.O_WRONLY | unix.O_NOFOLLOW

func invalidArchive(format string, args ...any) error {
	return apierr.New(http.StatusBadRequest, "invalid_archive", "the archive is refused, nothing was changed: %s", fmt.Sprintf(format, args...))
}

func noSpace(format string, args ...any) error {
	return apierr.New(http.StatusInsufficientStorage, "no_space", format, args...)
}

// checkSpace refuses what cannot fit beside the workspace of now, which stays until the new one is complete.
func checkSpace(r *root, want limits) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(r.fd, &fs); err != nil {
		return fmt.Errorf("free space of the workspace is unknown: %w", err)
	}
	if free := int64(fs.Bavail) * fs.Bsize; want.bytes > free {
		return noSpace("the archive holds %d bytes and the workspace has %d free (its present files stay until the new ones are complete): remove files or use a larger workspace", want.bytes, free)
	}
	// Zero in all: a file system that has no fixed number of files.
	if fs.Files > 0 && want.entries > int64(fs.Ffree) {
		return noSpace("the archive holds %d entries and the workspace has room for %d (its present files stay until the new ones are complete): remove files or use a larger workspace", want.entries, fs.Ffree)
	}
	return nil
}

// unpacker writes the members of an archive below a folder. It takes them in walk order only, as pack writes them: each folder before what is in it,
// and all of that together. So it holds the folders of one path, however many there are, and every name is made by its folder's descriptor: nothing
// is ever written through a link or a name that came from the archive.
type unpacker struct {
	in      *tarfmt.Reader
	root    *root
	want    limits
	watch   *watch
	stack   []open
	closed  []closed
	count   Index
	index   Index
	dropped int64 // extended attributes that this file system does not take
	xattrs  xattrs
	scratch []byte
}

// open is a folder that is being filled. was is the present folder of the same name, -1 where there is none.
type open struct {
	fd     int
	was    int
	name   string // whole
	header *tarfmt.Header
}

func (o open) close() {
	_ = unix.Close(o.fd)
	if o.was >= 0 {
		_ = unix.Close(o.was)
	}
}

// closed is a folder whose mode would keep even its owner out: it gets it when all is in place, since hard links may lead through it.
type closed struct {
	name string
	mode uint32
}

// run reads the whole archive into the folder.
func (u *unpacker) run(fd int) error {
	u.stack = []open{{fd: fd, was: u.root.fd}}
	defer func() {
		for _, o := range u.stack[1:] {
			o.close()
		}
	}()
	err := u.members()
	if errors.Is(err, tarfmt.ErrInvalid) {
		return invalidArchive("%s", strings.TrimPrefix(err.Error(), tarfmt.ErrInvalid.Error()+": "))
	}
	return err
}

func (u *unpacker) members() error {
	h, err := u.in.Next()
	if err != nil {
		return err
	}
	if h.Name != manifestName || h.Type != tarfmt.File || h.Sparse || h.Size > maxManifest {
		return invalidArchive("its first member is %.100q and not its manifest", h.Name)
	}
	if err := u.in.Data(h.Size, func([]byte) error { return nil }); err != nil {
		return err
	}
	for {
		h, err := u.in.Next()
		if err == io.EOF {
			return invalidArchive("it has no index, so its end is missing: take the snapshot again")
		}
		if err != nil {
			return err
		}
		if err := u.watch.err(); err != nil {
			return err
		}
		u.watch.progress()
		top, _, _ := strings.Cut(h.Name, "/")
		switch {
		case h.Name == indexName:
			return u.finish(h)
		case h.Name == failureName:
			return invalidArchive("it is that of a snapshot that failed: take the snapshot again")
		case top == tree.Reserved, top == tree.LostFound:
			return invalidArchive("%.100q is a name that no archive may hold", h.Name)
		}
		if err := u.member(h); err != nil {
			return u.failure(h.Name, err)
		}
	}
}

// failure turns what the kernel said about a member into an error of the API.
func (u *unpacker) failure(name string, err error) error {
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return err
	}
	name = fmt.Sprintf("%.300q", name)
	switch errno {
	case unix.ENOSPC, unix.EDQUOT:
		return noSpace("the workspace is full at %s, after %d bytes and %d entries of %d and %d (its present files stay until the new ones are complete): use a larger workspace",
			name, u.count.Bytes, u.count.Entries, u.want.bytes, u.want.entries)
	case unix.EFBIG:
		return noSpace("%s is larger than this file system allows", name)
	case unix.EEXIST:
		return invalidArchive("%s is in it twice", name)
	case unix.EINVAL, unix.EILSEQ, unix.ENAMETOOLONG, unix.EMLINK:
		return invalidArchive("%s cannot be made on this file system (%v)", name, errno)
	}
	return fmt.Errorf("%s could not be restored, nothing was changed: %w", name, errno)
}

// member makes one entry.
func (u *unpacker) member(h *tarfmt.Header) error {
	if u.count.Entries++; u.count.Entries > u.want.entries {
		return invalidArchive("it has more than the %d entries that were announced", u.want.entries)
	}
	folder, name := "", h.Name
	if i := strings.LastIndexByte(h.Name, '/'); i >= 0 {
		folder, name = h.Name[:i], h.Name[i+1:]
	}
	for len(u.stack) > 1 && u.stack[len(u.stack)-1].name != folder {
		if err := u.pop(); err != nil {
			return err
		}
	}
	top := u.stack[len(u.stack)-1]
	if top.name != folder {
		return invalidArchive("the folder of %.100q does not stand before it, or is no folder", h.Name)
	}
	switch h.Type {
	case tarfmt.Directory:
		return u.directory(top, name, h)
	case tarfmt.Symlink:
		u.count.Symlinks++
		if err := unix.Symlinkat(h.Linkname, top.fd, name); err != nil {
			return err
		}
		return setTime(top.fd, name, h)
	case tarfmt.Hardlink:
		u.count.Hardlinks++
		return u.hardlink(top.fd, name, h)
	}
	u.count.Files++
	return u.file(top, name, h)
}

func (u *unpacker) directory(in open, name string, h *tarfmt.Header) error {
	u.count.Directories++
	if len(u.stack) > maxDepth {
		return invalidArchive("%.300q… lies more than %d folders deep", h.Name, maxDepth)
	}
	if err := unix.Mkdirat(in.fd, name, 0o700); err != nil {
		return err
	}
	fd, err := tree.Open(in.fd, name, folderFlags, 0)
	if err != nil {
		return err
	}
	was := -1
	if in.was >= 0 {
		if was, err = tree.Open(in.was, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0); err != nil {
			was = -1
		}
	}
	u.stack = append(u.stack, open{fd, was, h.Name, h})
	return u.setAttributes(fd, h)
}

// pop finishes the folder that was being filled. Its time comes last, since every entry changes it.
func (u *unpacker) pop() error {
	last := u.stack[len(u.stack)-1]
	u.stack = u.stack[:len(u.stack)-1]
	defer last.close()
	mode := last.header.Mode
	if mode&0o700 != 0o700 && (mode&0o100 == 0 || len(u.stack) == 1) {
		// At the top also those that only lack write permission: the exchange moves them, and gives them their mode after that.
		u.closed = append(u.closed, closed{last.name, mode})
		mode = 0o700
	}
	if err := unix.Fchmod(last.fd, mode); err != nil {
		return err
	}
	return setTime(last.fd, "", last.header)
}

func setTime(dir int, name string, h *tarfmt.Header) error {
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: h.Seconds, Nsec: h.Nanos}}
	flags := unix.AT_SYMLINK_NOFOLLOW
	if name == "" {
		return unix.UtimesNanoAt(unix.AT_FDCWD, tree.Self(dir), times, 0)
	}
	return unix.UtimesNanoAt(dir, name, times, flags)
}

// file makes a file, or gives the present one that is the same another name.
func (u *unpacker) file(in open, name string, h *tarfmt.Header) error {
	same := u.openSame(in.was, name, h)
	if same >= 0 {
		defer func() { _ = unix.Close(same) }()
	}
	fd, err := u.fill(in.fd, name, h, same)
	if fd < 0 {
		return err
	}
	if err == nil {
		err = u.setAttributes(fd, h)
	}
	if err == nil {
		err = unix.Fchmod(fd, h.Mode)
	}
	if err == nil {
		err = setTime(in.fd, name, h)
	}
	if closing := unix.Close(fd); err == nil {
		err = closing
	}
	return err
}

// fill writes the data of a file, and makes its holes. As long as a present file has the same bytes nothing is made; -1 when that held to the end.
func (u *unpacker) fill(dir int, name string, h *tarfmt.Header, same int) (fd int, err error) {
	create := func(equal int64) (err error) {
		if fd, err = tree.Open(dir, name, createFlags, 0o600); err != nil {
			fd = -1
			return err
		}
		return u.copyFrom(same, fd, equal)
	}
	if fd = -1; same < 0 {
		if err := create(0); err != nil {
			return fd, err
		}
	}
	segments := h.Segments
	if !h.Sparse {
		segments = []tarfmt.Segment{{Length: h.Size}}
	} else if err := unix.Ftruncate(fd, h.Size); err != nil {
		return fd, err
	}
	for _, s := range segments {
		if u.count.Bytes += s.Length; u.count.Bytes > u.want.bytes {
			return fd, invalidArchive("it has more than the %d bytes of data that were announced", u.want.bytes)
		}
		offset := s.Offset
		err := u.in.Data(s.Length, func(b []byte) error {
			if fd < 0 && !u.equals(same, b, offset) {
				if err := create(offset); err != nil {
					return err
				}
			}
			at := offset
			offset += int64(len(b))
			if fd < 0 {
				return nil
			}
			return writeFull(fd, b, at)
		})
		if err != nil {
			return fd, err
		}
	}
	if fd < 0 && unix.Linkat(unix.AT_FDCWD, tree.Self(same), dir, name, unix.AT_SYMLINK_FOLLOW) != nil {
		err = create(h.Size) // a file system, or a file, that takes no second name
	}
	return fd, err
}

func (u *unpacker) setAttributes(fd int, h *tarfmt.Header) error {
	for _, x := range h.Xattrs {
		err := unix.Fsetxattr(fd, x.Name, []byte(x.Value), 0)
		if err == unix.ENOTSUP || err == unix.ENOSYS {
			u.dropped++
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// hardlink gives an earlier file one more name. The way to it is walked without links, so that it is one of this archive.
func (u *unpacker) hardlink(dir int, name string, h *tarfmt.Header) error {
	missing := func() error {
		return invalidArchive("%.100q is a hard link to %.100q, which is no earlier file of the archive", h.Name, h.Linkname)
	}
	at, rest := u.stack[0].fd, h.Linkname
	for {
		part, more, deeper := strings.Cut(rest, "/")
		if !deeper {
			break
		}
		fd, err := tree.Open(at, part, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if at != u.stack[0].fd {
			_ = unix.Close(at)
		}
		if err != nil {
			return missing()
		}
		at, rest = fd, more
	}
	if at != u.stack[0].fd {
		defer func() { _ = unix.Close(at) }()
	}
	st, err := tree.Stat(at, rest)
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return missing()
	}
	return unix.Linkat(at, rest, dir, name, 0)
}

// finish reads the index, which has to fit what came before it and to be the last member, and gives the folders their modes.
func (u *unpacker) finish(h *tarfmt.Header) error {
	sum := u.in.SumBefore()
	if h.Type != tarfmt.File || h.Sparse || h.Size > maxManifest {
		return invalidArchive("its index is no file of a usual size")
	}
	var text []byte
	if err := u.in.Data(h.Size, func(b []byte) error { text = append(text, b...); return nil }); err != nil {
		return err
	}
	if err := json.Unmarshal(text, &u.index); err != nil {
		return invalidArchive("its index cannot be read (%v)", err)
	}
	if u.index.Format != indexFormat {
		return invalidArchive("its index has format %d, this version knows %d", u.index.Format, indexFormat)
	}
	if sum == "" || u.index.SHA256 != sum {
		return invalidArchive("its digest is not that of its index, so bytes were changed")
	}
	want := u.count
	want.Format, want.SHA256, want.Skipped = u.index.Format, u.index.SHA256, u.index.Skipped
	if want != u.index {
		return invalidArchive("its index counts %d entries and %d bytes, there are %d and %d", u.index.Entries, u.index.Bytes, u.count.Entries, u.count.Bytes)
	}
	if _, err := u.in.Next(); err != io.EOF {
		if err == nil {
			err = invalidArchive("members follow its index")
		}
		return err
	}
	for len(u.stack) > 1 {
		if err := u.pop(); err != nil {
			return u.failure("", err)
		}
	}
	return u.closeFolders()
}

// closeFolders gives the folders below the top the modes that keep their owner out, the deepest first; those at the top get theirs in the exchange.
func (u *unpacker) closeFolders() error {
	for _, c := range u.closed {
		if !strings.Contains(c.name, "/") {
			continue
		}
		if err := chmodBelow(u.stack[0].fd, c.name, c.mode); err != nil {
			return u.failure(c.name, err)
		}
	}
	return nil
}

// chmodBelow changes the mode of a folder by a path that is walked without links.
func chmodBelow(root int, path string, mode uint32) error {
	at := root
	defer func() {
		if at != root {
			_ = unix.Close(at)
		}
	}()
	for {
		part, rest, deeper := strings.Cut(path, "/")
		if !deeper {
			return tree.Chmod(at, part, mode)
		}
		fd, err := tree.Open(at, part, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		if at != root {
			_ = unix.Close(at)
		}
		at, path = fd, rest
	}
}
