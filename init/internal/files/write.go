package files

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

// target checks a path that names what is to be written, removed or moved, and cuts it.
func target(path string) (dir, name string, err error) {
	dir, name = split(path)
	if name == "" {
		return "", "", apierr.Invalid("%s does not end in a name: name the file or folder itself", shown(path))
	}
	return dir, name, nil
}

// checkName refuses the reserved name at the top of the workspace.
func checkName(below, name, path string) error {
	if below == "" && name == tree.Reserved {
		return reserved(path)
	}
	return nil
}

// defaultFolderMode is the mode of folders that are made on the way, whatever the umask is.
const defaultFolderMode = 0o755

func (h *Handler) write(w http.ResponseWriter, r *http.Request, q query) error {
	path, err := q.path("path")
	if err != nil {
		return err
	}
	mode, err := q.mode(0o644)
	if err != nil {
		return err
	}
	limit, limited, err := q.limit()
	if err != nil {
		return err
	}
	if strings.HasSuffix(path, "/") {
		return apierr.Invalid("%s ends in a slash and so names a directory: name a file", shown(path))
	}
	if h.absolute(path) == h.workspace {
		return apierr.Invalid("%s is the workspace itself, a directory: name a file below it", shown(path))
	}
	dir, name, err := target(path)
	if err != nil {
		return err
	}
	if limited && r.ContentLength > limit {
		return tooLarge(path, limit)
	}
	leave, err := h.gate.Enter()
	if err != nil {
		return err
	}
	defer leave()
	ws, err := h.open()
	if err != nil {
		return err
	}
	defer ws.close()
	f, err := ws.walk(dir, path)
	if err != nil {
		return err
	}
	defer f.close()
	if len(f.missing) == 0 {
		// Said before the body is read; said again by the rename for what changes meanwhile.
		if err := replaceable(f.fd, name, path); err != nil {
			return err
		}
	}
	if below, err := ws.writable(f.fd, path); err != nil {
		return err
	} else if err := checkName(below, firstName(f.missing, name), path); err != nil {
		return err
	}
	u, err := newUpload(f.fd)
	if err != nil {
		return failure(path, err)
	}
	defer u.close()
	if err := u.receive(&patientReader{r.Body, http.NewResponseController(w)}, path, limit, limited); err != nil {
		return err
	}
	if err := unix.Fchmod(u.fd, mode); err != nil {
		return failure(path, err)
	}
	// Only now: an upload that ends early leaves nothing, no folders either.
	below, err := ws.complete(f, path, defaultFolderMode)
	if err != nil {
		return err
	}
	if err := checkName(below, name, path); err != nil {
		f.undo()
		return err
	}
	st, err := u.commit(f.fd, name, path)
	if err != nil {
		f.undo()
		return failure(path, err)
	}
	answer(w, http.StatusOK, info{name: name, path: h.absolute(path), stat: st})
	return nil
}

// firstName is the name that will be made first.
func firstName(missing []string, name string) string {
	for _, part := range missing {
		if part != "" && part != "." {
			return part
		}
	}
	return name
}

func tooLarge(path string, limit int64) error {
	return apierr.New(http.StatusRequestEntityTooLarge, "payload_too_large", "the body for %s is larger than the limit of %d bytes: nothing was written", shown(path), limit)
}

// replaceable says whether a file may take the place of what has the name now: nothing, a regular file or a link.
func replaceable(dir int, name, path string) error {
	st, err := tree.Stat(dir, name)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return failure(path, err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG, unix.S_IFLNK:
		return nil
	case unix.S_IFDIR:
		return failure(path, unix.EISDIR)
	}
	return apierr.Invalid("%s is a socket, pipe or device: remove it first", shown(path))
}

// upload is a file in the making. It has no name where the filesystem can do that (so that nothing is left whenever init dies), else a temporary one.
type upload struct {
	fd   int
	dir  int
	name string // "" without one
}

func newUpload(dir int) (*upload, error) {
	fd, err := tree.Open(dir, ".", unix.O_TMPFILE|unix.O_WRONLY, 0o600)
	if err == nil {
		return &upload{fd: fd, dir: -1}, nil
	}
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOSYS) {
		return nil, err
	}
	return newNamedUpload(dir)
}

func newNamedUpload(dir int) (*upload, error) {
	name := newTemporaryName()
	fd, err := tree.Open(dir, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	own, err := unix.FcntlInt(uintptr(dir), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		_ = unix.Close(fd)
		_ = unix.Unlinkat(dir, name, 0)
		return nil, err
	}
	return &upload{fd: fd, dir: own, name: name}, nil
}

func newTemporaryName() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails (crypto/rand)
	return tree.TemporaryName(id)
}

// patience bounds how long a body may stand still: a caller that has gone must not hold a file, and with it a restore, for ever.
const patience = 2 * time.Minute

// patientReader is a request body that fails when nothing comes for some time.
type patientReader struct {
	body    io.Reader
	control *http.ResponseController
}

func (p *patientReader) Read(b []byte) (int, error) {
	_ = p.control.SetReadDeadline(time.Now().Add(patience)) // not every transport has deadlines; a dead channel ends the read as well
	n, err := p.body.Read(b)
	if err == io.EOF {
		_ = p.control.SetReadDeadline(time.Time{})
	}
	return n, err
}

// receive copies the body into the file.
func (u *upload) receive(body io.Reader, path string, limit int64, limited bool) error {
	buf := buffers.Get().(*[64 << 10]byte)
	defer buffers.Put(buf)
	total := int64(0)
	for {
		n, err := body.Read(buf[:])
		total += int64(n)
		if limited && total > limit {
			return tooLarge(path, limit)
		}
		if e := writeAll(u.fd, buf[:n]); e != nil {
			return failure(path, e)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return apierr.Invalid("the body for %s ended early (%v): nothing was written, send it again", shown(path), err)
		}
	}
}

func writeAll(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(fd, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// commit gives the file its name in dir, in the place of a file or link that has it.
func (u *upload) commit(dir int, name, path string) (unix.Statx_t, error) {
	if err := replaceable(dir, name, path); err != nil {
		return unix.Statx_t{}, err
	}
	if u.name == "" {
		err := u.link(dir, name)
		if err == unix.EEXIST {
			temporary := newTemporaryName()
			if err = u.link(dir, temporary); err == nil {
				err = unix.Renameat(dir, temporary, dir, name)
				if err != nil {
					_ = unix.Unlinkat(dir, temporary, 0)
				}
			}
		}
		if err != nil {
			return unix.Statx_t{}, err
		}
	} else {
		if err := unix.Renameat(u.dir, u.name, dir, name); err != nil {
			return unix.Statx_t{}, err
		}
		_ = unix.Close(u.dir)
		u.name = ""
	}
	return tree.Stat(u.fd, "")
}

func (u *upload) link(dir int, name string) error {
	return unix.Linkat(unix.AT_FDCWD, tree.Self(u.fd), dir, name, unix.AT_SYMLINK_FOLLOW)
}

func (u *upload) close() {
	_ = unix.Close(u.fd)
	if u.name != "" {
		_ = unix.Unlinkat(u.dir, u.name, 0)
		_ = unix.Close(u.dir)
	}
}

func (h *Handler) makeDir(w http.ResponseWriter, _ *http.Request, q query) error {
	path, err := q.path("path")
	if err != nil {
		return err
	}
	mode, err := q.mode(defaultFolderMode)
	if err != nil {
		return err
	}
	leave, err := h.gate.Enter()
	if err != nil {
		return err
	}
	defer leave()
	ws, err := h.open()
	if err != nil {
		return err
	}
	defer ws.close()
	f, err := ws.walk(path, path)
	if err != nil {
		if st, found := tree.Stat(ws.fd, path); found == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Mode&unix.S_IFMT != unix.S_IFLNK {
			return apierr.Conflict("%s exists and is no directory: remove it first", shown(path))
		}
		return err
	}
	defer f.close()
	if _, err := ws.complete(f, path, mode); err != nil {
		return err
	}
	st, err := tree.Stat(f.fd, "")
	if err != nil {
		return failure(path, err)
	}
	answer(w, http.StatusOK, info{name: base(path), path: h.absolute(path), stat: st})
	return nil
}

func (h *Handler) remove(w http.ResponseWriter, _ *http.Request, q query) error {
	path, err := q.path("path")
	if err != nil {
		return err
	}
	recursive, err := q.flag("recursive")
	if err != nil {
		return err
	}
	dir, name, err := target(path)
	if err != nil {
		return err
	}
	leave, err := h.gate.Enter()
	if err != nil {
		return err
	}
	defer leave()
	ws, err := h.open()
	if err != nil {
		return err
	}
	defer ws.close()
	f, err := ws.existing(dir, path)
	if err != nil {
		return err
	}
	defer f.close()
	if _, err := ws.place(f.fd, name, path); err != nil {
		return err
	}
	if err := removeEntry(f.fd, name, recursive); err != nil {
		return failure(path, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// place checks the name itself, and returns what it is now.
func (ws *workspace) place(dir int, name, path string) (unix.Statx_t, error) {
	below, err := ws.writable(dir, path)
	if err == nil {
		err = checkName(below, name, path)
	}
	if err != nil {
		return unix.Statx_t{}, err
	}
	st, err := tree.Stat(dir, name)
	return st, failure(path, err)
}

func removeEntry(dir int, name string, recursive bool) error {
	st, err := tree.Stat(dir, name)
	switch {
	case err != nil:
		return err
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return unix.Unlinkat(dir, name, 0)
	case recursive:
		return tree.Remove(dir, name)
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
}

func (h *Handler) move(w http.ResponseWriter, _ *http.Request, q query) error {
	from, err := q.path("from")
	if err != nil {
		return err
	}
	to, err := q.path("to")
	if err != nil {
		return err
	}
	overwrite, err := q.flag("overwrite")
	if err != nil {
		return err
	}
	fromDir, fromName, err := target(from)
	if err != nil {
		return err
	}
	toDir, toName, err := target(to)
	if err != nil {
		return err
	}
	leave, err := h.gate.Enter()
	if err != nil {
		return err
	}
	defer leave()
	ws, err := h.open()
	if err != nil {
		return err
	}
	defer ws.close()
	source, err := ws.existing(fromDir, from)
	if err != nil {
		return err
	}
	defer source.close()
	goal, err := ws.existing(toDir, to)
	if err != nil {
		return err
	}
	defer goal.close()
	if _, err := ws.place(source.fd, fromName, from); err != nil {
		return err
	}
	if below, err := ws.writable(goal.fd, to); err != nil {
		return err
	} else if err := checkName(below, toName, to); err != nil {
		return err
	}
	if err := rename(source.fd, fromName, goal.fd, toName, overwrite); err != nil {
		return moveFailure(from, to, err)
	}
	st, err := tree.Stat(goal.fd, toName)
	if err != nil {
		return failure(to, err)
	}
	answer(w, http.StatusOK, info{name: toName, path: h.absolute(to), stat: st})
	return nil
}

// moveFailure names both paths where the kernel's reason may be about either.
func moveFailure(from, to string, err error) error {
	switch {
	case errors.Is(err, unix.EEXIST), errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTDIR):
		return apierr.Conflict("%s is in the way of %s: remove it first, or use overwrite=1 to put a file over a file", shown(to), shown(from))
	case errors.Is(err, unix.EINVAL):
		return apierr.Invalid("%s cannot be moved into itself", shown(from))
	}
	return failure(fmt.Sprintf("%s → %s", from, to), err)
}

func rename(fromDir int, from string, toDir int, to string, overwrite bool) error {
	if overwrite {
		return replace(fromDir, from, toDir, to)
	}
	err := unix.Renameat2(fromDir, from, toDir, to, unix.RENAME_NOREPLACE)
	if err != unix.EINVAL && err != unix.ENOSYS {
		return err
	}
	// A filesystem without the flag (or a move into itself, which fails below too): asked before, since there is no better way.
	if _, err := tree.Stat(toDir, to); err != unix.ENOENT {
		if err == nil {
			err = unix.EEXIST
		}
		return err
	}
	return unix.Renameat(fromDir, from, toDir, to)
}

// replace is rename; where both names are one file already it does what the caller means and removes the first, since the kernel then does nothing.
func replace(fromDir int, from string, toDir int, to string) error {
	a, err := tree.Stat(fromDir, from)
	if err != nil {
		return err
	}
	b, missing := tree.Stat(toDir, to)
	if err := unix.Renameat(fromDir, from, toDir, to); err != nil {
		return err
	}
	if missing != nil || a.Ino != b.Ino || a.Nlink < 2 || a.Mode&unix.S_IFMT == unix.S_IFDIR || !tree.SameMount(&a, &b) {
		return nil
	}
	c, err := tree.Stat(fromDir, from)
	if err != nil || c.Ino != a.Ino {
		return nil
	}
	source, err := tree.Stat(fromDir, "")
	if err != nil {
		return err
	}
	goal, err := tree.Stat(toDir, "")
	if err != nil || (source.Ino == goal.Ino && from == to) {
		return err
	}
	return unix.Unlinkat(fromDir, from, 0)
}
