package files

import (
	"os"
	"slices"
	"strings"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

const (
	maxName = 255
	maxPath = 4095
)

const (
	pathFlags   = unix.O_PATH
	folderFlags = unix.O_PATH | unix.O_DIRECTORY
)

// checkPath refuses what can be no path, before the file system is asked.
func checkPath(p string) error {
	switch {
	case p == "":
		return apierr.Invalid("the path is empty: give one that is absolute or relative to the workspace")
	case strings.IndexByte(p, 0) >= 0:
		return apierr.Invalid("%s has a NUL byte, which no path can have", shown(p))
	case strings.HasPrefix(p, "//"):
		return apierr.Invalid("%s begins with two slashes: write one", shown(p))
	case len(p) > maxPath:
		return failure(p, unix.ENAMETOOLONG)
	}
	for part := range strings.SplitSeq(p, "/") {
		if len(part) > maxName {
			return failure(p, unix.ENAMETOOLONG)
		}
	}
	return nil
}

// absolute is the path as answers show it: absolute, without empty and "." parts; ".." stays, since after a link it is not what it seems.
func (h *Handler) absolute(p string) string {
	var b strings.Builder
	if !strings.HasPrefix(p, "/") {
		b.WriteString(h.workspace)
	}
	for part := range strings.SplitSeq(p, "/") {
		if part != "" && part != "." {
			b.WriteByte('/')
			b.WriteString(part)
		}
	}
	if b.Len() == 0 {
		return "/"
	}
	return b.String()
}

// split cuts a path into its folder and its last name. The name is "" where the path does not end in a name of its own ("x/..", "/").
func split(p string) (folder, name string) {
	p = strings.TrimRight(p, "/")
	i := strings.LastIndexByte(p, '/')
	folder, name = p[:i+1], p[i+1:]
	if name == "." || name == ".." {
		return p, ""
	}
	return folder, name
}

// workspace is the open workspace: where it really is, and its mount.
type workspace struct {
	fd   int
	real string
	stat unix.Statx_t
}

func (h *Handler) open() (*workspace, error) {
	fd, err := tree.Open(unix.AT_FDCWD, h.workspace, folderFlags, 0)
	if err != nil {
		return nil, failure(h.workspace, err)
	}
	ws := &workspace{fd: fd}
	if ws.real, err = tree.Where(fd); err == nil {
		ws.stat, err = tree.Stat(fd, "")
	}
	if err != nil {
		ws.close()
		return nil, failure(h.workspace, err)
	}
	return ws, nil
}

func (ws *workspace) close() { _ = unix.Close(ws.fd) }

// within is the path of a real place below the workspace: "" for the workspace itself; ok is false outside.
func (ws *workspace) within(real string) (below string, ok bool) {
	if real == ws.real {
		return "", true
	}
	root := ws.real
	if root != "/" {
		root += "/"
	}
	return strings.CutPrefix(real, root)
}

// isReserved tells whether a place below the workspace is init's own.
func isReserved(below string) bool {
	return below == tree.Reserved || strings.HasPrefix(below, tree.Reserved+"/")
}

func reserved(path string) error {
	return apierr.Invalid("%s is reserved: take a name other than %s at the top of the workspace", shown(path), tree.Reserved)
}

// writable says whether entries of an open folder may be changed: it is in the workspace and on its mount. below is where.
func (ws *workspace) writable(fd int, path string) (below string, err error) {
	real, err := tree.Where(fd)
	if err != nil {
		return "", err
	}
	below, ok := ws.within(real)
	if ok {
		st, err := tree.Stat(fd, "")
		if err != nil {
			return "", failure(path, err)
		}
		ok = tree.SameMount(&st, &ws.stat)
	}
	if !ok {
		return "", forbidden("%s leads to %s, outside the workspace: writes only go below %s", shown(path), shown(real), ws.real)
	}
	if isReserved(below) {
		return "", reserved(path)
	}
	return below, nil
}

// folder is an open directory in which a name may be changed, and the parts of the path that do not exist yet.
type folder struct {
	fd      int
	missing []string
	created []created
}

// created is a directory that was made on the way, for taking it back.
type created struct {
	parent int
	name   string
}

// walk opens the folder of a path as far as it exists, and checks that it may be written.
func (ws *workspace) walk(dir, path string) (*folder, error) {
	f := &folder{fd: -1}
	base, parts := ws.fd, strings.Split(dir, "/")
	if strings.HasPrefix(dir, "/") {
		root, err := tree.Open(unix.AT_FDCWD, "/", folderFlags, 0)
		if err != nil {
			return nil, failure(path, err)
		}
		f.fd, base = root, root
	}
	for i, part := range parts {
		if part == "" || part == "." {
			continue
		}
		fd, err := tree.Open(base, part, folderFlags, 0)
		if err == unix.ENOENT {
			if st, exists := tree.Stat(base, part); exists == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK {
				f.close()
				return nil, apierr.Invalid("%s leads through %s, a link to nothing: remove the link or make its target", shown(path), shown(part))
			}
			f.missing = parts[i:]
			break
		}
		if err != nil {
			f.close()
			return nil, failure(path, err)
		}
		f.become(fd)
		base = fd
	}
	if f.fd < 0 {
		fd, err := tree.Open(ws.fd, ".", folderFlags, 0)
		if err != nil {
			return nil, failure(path, err)
		}
		f.fd = fd
	}
	if _, err := ws.writable(f.fd, path); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// existing is walk for a folder that must be there.
func (ws *workspace) existing(dir, path string) (*folder, error) {
	f, err := ws.walk(dir, path)
	if err == nil && len(f.missing) > 0 {
		f.close()
		return nil, failure(path, unix.ENOENT)
	}
	return f, err
}

// complete makes the missing folders, the last with the given mode, and checks where it has arrived.
func (ws *workspace) complete(f *folder, path string, mode uint32) (below string, err error) {
	parts := slices.DeleteFunc(f.missing, func(part string) bool { return part == "" || part == "." })
	for i, part := range parts {
		m := uint32(defaultFolderMode)
		if i == len(parts)-1 {
			m = mode
		}
		fd, err := f.enter(ws, part, path, m)
		if err != nil {
			f.undo()
			return "", failure(path, err)
		}
		f.become(fd)
	}
	f.missing = nil
	below, err = ws.writable(f.fd, path)
	if err != nil {
		f.undo()
	}
	return below, err
}

// enter opens a part, and makes it where it is missing.
func (f *folder) enter(ws *workspace, part, path string, mode uint32) (int, error) {
	fd, err := tree.Open(f.fd, part, folderFlags, 0)
	if err != unix.ENOENT {
		return fd, err
	}
	below, err := ws.writable(f.fd, path)
	if err != nil {
		return -1, err
	}
	if below == "" && part == tree.Reserved {
		return -1, reserved(path)
	}
	fd, err = makeDir(f.fd, part, mode)
	if err == unix.EEXIST { // somebody was faster: a directory will do, a link to nothing will not
		return tree.Open(f.fd, part, folderFlags, 0)
	}
	if err != nil {
		return -1, err
	}
	if parent, err := unix.FcntlInt(uintptr(f.fd), unix.F_DUPFD_CLOEXEC, 0); err == nil {
		f.created = append(f.created, created{parent, part})
	}
	return fd, nil
}

// makeDir makes a directory with exactly this mode and opens it.
func makeDir(dir int, name string, mode uint32) (int, error) {
	if err := unix.Mkdirat(dir, name, mode|0o700); err != nil {
		return -1, err
	}
	fd, err := tree.Open(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return -1, err
	}
	// Unconditional: the umask, a setgid parent and a default ACL all change what mkdir was asked for.
	if err := unix.Fchmod(fd, mode); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (f *folder) become(fd int) {
	if f.fd >= 0 {
		_ = unix.Close(f.fd)
	}
	f.fd = fd
}

// undo removes the folders that were made on the way, where they are still empty.
func (f *folder) undo() {
	for i := len(f.created) - 1; i >= 0; i-- {
		_ = unix.Unlinkat(f.created[i].parent, f.created[i].name, unix.AT_REMOVEDIR)
	}
}

func (f *folder) close() {
	if f.fd >= 0 {
		_ = unix.Close(f.fd)
		f.fd = -1
	}
	for _, c := range f.created {
		_ = unix.Close(c.parent)
	}
	f.created = nil
}

// checkReadable refuses init's own /proc directories, by whatever way they were reached: they would show init and not the sandbox.
// Threads have directories too, which /proc does not list.
func (ws *workspace) checkReadable(real, path string) error {
	if below, ok := ws.within(real); ok && isReserved(below) {
		return reserved(path)
	}
	rest, ok := strings.CutPrefix(real, "/proc/")
	if !ok {
		return nil
	}
	id, _, _ := strings.Cut(rest, "/")
	switch id {
	case "self", "thread-self", "1":
	default:
		if _, err := os.Lstat("/proc/self/task/" + id); err != nil || id == "" {
			return nil
		}
	}
	return forbidden("%s leads to /proc/%s, which belongs to init and cannot be read", shown(path), id)
}
