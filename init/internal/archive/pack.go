package archive

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/tarfmt"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

// maxDepth bounds the folders in folders, and with it the descriptors that a walk holds.
const maxDepth = 1000

const (
	fileFlags   = unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_NOCTTY // NONBLOCK: what has become a pipe must not hold the walk
	folderFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW
)

// pack writes the manifest, the workspace and the index.
func pack(w *tarfmt.Writer, r *root, manifest []byte, watch *watch) error {
	p := &packer{w: w, root: r, watch: watch, links: map[inode]link{}}
	if err := w.WriteFile(manifestName, manifest); err != nil {
		return err
	}
	// The workspace's own descriptor keeps its place; the walk has one of its own.
	fd, err := tree.Open(r.fd, ".", folderFlags, 0)
	if err != nil {
		return fmt.Errorf("workspace cannot be read: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := p.folder(fd, 0); err != nil {
		return err
	}
	p.index.Format, p.index.SHA256 = indexFormat, w.Sum()
	p.index.Entries = p.index.Files + p.index.Directories + p.index.Symlinks + p.index.Hardlinks
	index, err := json.Marshal(p.index)
	if err != nil {
		return err
	}
	if err := w.WriteFile(indexName, index); err != nil {
		return err
	}
	return w.Close()
}

// inode identifies a file with several names.
type inode struct {
	device, number uint64
}

// link is the first name of such a file, and how many more are expected: when all were seen it is forgotten, so that memory is not spent on them.
type link struct {
	name string
	left uint32
}

type packer struct {
	w      *tarfmt.Writer
	root   *root
	watch  *watch
	index  Index
	path   []byte
	links  map[inode]link
	xattrs xattrs
}

// fail makes an error that names the current member.
func (p *packer) fail(err error) error {
	var errno unix.Errno
	name := fmt.Sprintf("%q", p.path)
	switch {
	case !errors.As(err, &errno):
		return fmt.Errorf("%s: %w", name, err)
	case errno == unix.EACCES || errno == unix.EPERM:
		return apierr.New(403, "forbidden", "%s cannot be read and belongs to another user, so the workspace cannot be archived: remove it or change its mode", name)
	}
	return fmt.Errorf("%s could not be archived: %w", name, errno)
}

// folder writes what is in an open folder.
func (p *packer) folder(fd, depth int) error {
	length := len(p.path)
	return tree.Each(fd, func(e tree.Entry) error {
		if depth == 0 && (e.Name == tree.Reserved || e.Name == tree.LostFound) || tree.IsTemporary(e.Name) {
			return nil
		}
		if err := p.watch.err(); err != nil {
			return err
		}
		p.watch.progress()
		if depth > 0 {
			p.path = append(p.path, '/')
		}
		p.path = append(p.path, e.Name...)
		err := p.entry(fd, e.Name, e.Kind, depth)
		p.path = p.path[:length]
		return err
	})
}

func (p *packer) entry(dir int, name string, kind uint8, depth int) error {
	switch kind {
	case unix.DT_REG:
		return p.file(dir, name, depth)
	case unix.DT_DIR:
		return p.directory(dir, name, depth)
	case unix.DT_LNK:
		return p.symlink(dir, name, depth)
	case unix.DT_UNKNOWN:
		st, err := tree.Stat(dir, name)
		if err == unix.ENOENT {
			return nil
		}
		if err != nil {
			return p.fail(err)
		}
		if kind = uint8(st.Mode & unix.S_IFMT >> 12); kind != unix.DT_UNKNOWN { // DT_ types are the bits of S_IFMT
			return p.entry(dir, name, kind, depth)
		}
	}
	p.index.Skipped++
	return nil
}

func (p *packer) header(st *unix.Statx_t, kind tarfmt.Type) tarfmt.Header {
	return tarfmt.Header{Name: string(p.path), Type: kind, Mode: uint32(st.Mode & 0o7777), Seconds: st.Mtime.Sec, Nanos: int64(st.Mtime.Nsec)}
}

func (p *packer) symlink(dir int, name string, depth int) error {
	st, err := tree.Stat(dir, name)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return p.entry(dir, name, unix.DT_UNKNOWN, depth)
	}
	var target [unix.PathMax]byte
	n := 0
	if err == nil {
		n, err = unix.Readlinkat(dir, name, target[:])
	}
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return p.fail(err)
	}
	h := p.header(&st, tarfmt.Symlink)
	h.Linkname = string(target[:n])
	p.index.Symlinks++
	return p.w.WriteHeader(&h)
}

func (p *packer) directory(dir int, name string, depth int) error {
	if depth >= maxDepth {
		return apierr.Invalid("%.300q… lies more than %d folders deep, which an archive cannot hold: move or remove it", p.path, maxDepth)
	}
	fd, st, restore, err := p.open(dir, name, folderFlags, 0o500)
	if err == unix.ENOENT {
		return nil
	}
	if err == unix.ENOTDIR || err == unix.ELOOP {
		return p.entry(dir, name, unix.DT_UNKNOWN, depth)
	}
	if err != nil {
		return p.fail(err)
	}
	defer func() { _ = unix.Close(fd) }()
	defer restore()
	if !tree.SameMount(&st, &p.root.stat) {
		p.index.Skipped++
		return nil
	}
	h := p.header(&st, tarfmt.Directory)
	if h.Xattrs, _, err = p.xattrs.read(fd); err != nil {
		return p.fail(err)
	}
	p.index.Directories++
	if err := p.w.WriteHeader(&h); err != nil {
		return err
	}
	return p.folder(fd, depth+1)
}

// open opens a file or folder. Where its owner, who is us, has no permission, it gets it for as long as the open needs it: a file until it is open,
// a folder until restore is called. All processes are frozen meanwhile; if init is killed in between, the mode stays changed, as it would be after a
// chmod by the user.
func (p *packer) open(dir int, name string, flags int, need uint32) (fd int, st unix.Statx_t, restore func(), err error) {
	restore = func() {}
	fd, err = tree.Open(dir, name, flags|unix.O_NOATIME, 0)
	if err == unix.EPERM { // not the owner
		fd, err = tree.Open(dir, name, flags, 0)
	}
	if err == unix.EACCES {
		return p.openClosed(dir, name, flags, need)
	}
	if err != nil {
		return -1, st, restore, err
	}
	if st, err = tree.Stat(fd, ""); err != nil {
		_ = unix.Close(fd)
		return -1, st, restore, err
	}
	if mode := uint32(st.Mode & 0o7777); need&^mode != 0 && flags&unix.O_DIRECTORY != 0 && st.Uid == p.root.uid {
		// Readable, but its entries cannot be reached.
		if err := unix.Fchmod(fd, mode|need); err == nil {
			restore = func() { _ = unix.Fchmod(fd, mode) }
		}
	}
	return fd, st, restore, nil
}

func (p *packer) openClosed(dir int, name string, flags int, need uint32) (fd int, st unix.Statx_t, restore func(), err error) {
	restore = func() {}
	place, err := tree.Open(dir, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return -1, st, restore, err
	}
	defer func() { _ = unix.Close(place) }()
	if st, err = tree.Stat(place, ""); err != nil {
		return -1, st, restore, err
	}
	kind, mode := st.Mode&unix.S_IFMT, uint32(st.Mode&0o7777)
	if st.Uid != p.root.uid || (kind != unix.S_IFREG && kind != unix.S_IFDIR) {
		return -1, st, restore, unix.EACCES
	}
	if err := unix.Chmod(tree.Self(place), mode|need); err != nil {
		return -1, st, restore, err
	}
	fd, err = tree.Open(dir, name, flags, 0)
	if err != nil || flags&unix.O_DIRECTORY == 0 {
		if back := unix.Chmod(tree.Self(place), mode); err == nil && back != nil {
			_ = unix.Close(fd)
			err = back
		}
		return fd, st, restore, err
	}
	return fd, st, func() { _ = unix.Fchmod(fd, mode) }, nil
}

func (p *packer) file(dir int, name string, depth int) error {
	fd, st, _, err := p.open(dir, name, fileFlags, 0o400)
	if err == unix.ENOENT {
		return nil
	}
	if err == unix.ELOOP || err == unix.ENXIO {
		return p.entry(dir, name, unix.DT_UNKNOWN, depth)
	}
	if err != nil {
		return p.fail(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if st.Mode&unix.S_IFMT != unix.S_IFREG || !tree.SameMount(&st, &p.root.stat) {
		p.index.Skipped++
		return nil
	}
	h := p.header(&st, tarfmt.File)
	if st.Nlink > 1 {
		key := inode{uint64(st.Dev_major)<<32 | uint64(st.Dev_minor), st.Ino}
		if first, seen := p.links[key]; seen {
			if first.left--; first.left == 0 {
				delete(p.links, key)
			} else {
				p.links[key] = first
			}
			h.Type, h.Linkname = tarfmt.Hardlink, first.name
			p.index.Hardlinks++
			return p.w.WriteHeader(&h)
		}
		p.links[key] = link{h.Name, st.Nlink - 1}
	}
	h.Size = int64(st.Size)
	if h.Xattrs, _, err = p.xattrs.read(fd); err != nil {
		return p.fail(err)
	}
	if int64(st.Blocks)*512 < h.Size {
		if h.Segments, h.Sparse, err = findSegments(fd, h.Size, tarfmt.MaxSegments); err != nil {
			return p.fail(err)
		}
	}
	if err := p.w.WriteHeader(&h); err != nil {
		return err
	}
	p.index.Files++
	return p.data(fd, &h)
}

// data writes the bytes of a file: exactly as many as the header says. A file that grew meanwhile is cut at its size of before, as in any moment's
// picture of it; one that shrank ends the archive.
func (p *packer) data(fd int, h *tarfmt.Header) error {
	segments := h.Segments
	if !h.Sparse {
		segments = []tarfmt.Segment{{Length: h.Size}}
	}
	for _, s := range segments {
		offset := s.Offset
		err := p.w.Data(s.Length, func(b []byte) (int, error) {
			for {
				n, err := unix.Pread(fd, b, offset)
				if err == unix.EINTR {
					continue
				}
				offset += int64(max(n, 0))
				return n, err
			}
		})
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return apierr.Conflict("%q became shorter while it was archived, by a process from outside the sandbox: try again", p.path)
		}
		if err != nil {
			return p.fail(err)
		}
		p.index.Bytes += s.Length
	}
	return nil
}

// findSegments finds what of a file is no hole. With more pieces than an archive takes, the smallest holes are written as zeros.
func findSegments(fd int, size int64, limit int) (segments []tarfmt.Segment, sparse bool, err error) {
	smallest := int64(1) // hole that is kept
	for offset := int64(0); offset < size; {
		begin, err := unix.Seek(fd, offset, unix.SEEK_DATA)
		if err == unix.ENXIO || (err == nil && begin >= size) {
			break
		}
		if err == unix.EINVAL || err == unix.EOPNOTSUPP {
			return nil, false, nil // a file system that does not know
		}
		if err != nil {
			return nil, false, err
		}
		end, err := unix.Seek(fd, begin, unix.SEEK_HOLE)
		if err != nil && err != unix.ENXIO {
			return nil, false, err
		}
		if err == unix.ENXIO || end > size {
			end = size
		}
		offset = end
		segments = appendSegment(segments, tarfmt.Segment{Offset: begin, Length: end - begin}, smallest)
		for len(segments) > limit {
			smallest = max(4096, 2*smallest)
			kept := segments[:0]
			for _, s := range segments {
				kept = appendSegment(kept, s, smallest)
			}
			segments = kept
		}
	}
	whole := len(segments) == 1 && segments[0] == tarfmt.Segment{Length: size}
	if whole {
		return nil, false, nil
	}
	return segments, true, nil
}

// appendSegment adds s, or makes the last segment longer where the hole between is smaller than smallest.
func appendSegment(segments []tarfmt.Segment, s tarfmt.Segment, smallest int64) []tarfmt.Segment {
	if n := len(segments); n > 0 {
		last := &segments[n-1]
		if s.Offset-(last.Offset+last.Length) < smallest {
			last.Length = s.Offset + s.Length - last.Offset
			return segments
		}
	}
	return append(segments, s)
}
