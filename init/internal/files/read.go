package files

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

// Buffers are small and shared: a sandbox may have 16 MB of memory.
var buffers = sync.Pool{New: func() any { return new([64 << 10]byte) }}

// maxGenerated bounds files of /proc and /sys, whose size is not known before they are read.
const maxGenerated = 4 << 20

// openForReading opens a path and everything it leads through, and checks that it may be read. The descriptor is O_PATH: nothing was done to the file.
func (h *Handler) openForReading(path string) (fd int, st unix.Statx_t, err error) {
	ws, err := h.open()
	if err != nil {
		return -1, st, err
	}
	defer ws.close()
	if fd, err = tree.OpenPlain(ws.fd, path, pathFlags); err == tree.ErrMagicLink {
		return -1, st, forbidden("%s leads through a link of /proc to what another process has open, which cannot be read", shown(path))
	}
	if err != nil {
		return -1, st, failure(path, err)
	}
	real, err := tree.Where(fd)
	if err == nil {
		err = ws.checkReadable(real, path)
	}
	if err == nil {
		st, err = tree.Stat(fd, "")
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, st, failure(path, err)
	}
	return fd, st, nil
}

// reopen opens what an O_PATH descriptor stands for.
func reopen(fd, flags int) (int, error) {
	return tree.Open(unix.AT_FDCWD, tree.Self(fd), flags, 0)
}

func (h *Handler) read(w http.ResponseWriter, r *http.Request, q query) error {
	path, err := q.path("path")
	if err != nil {
		return err
	}
	limit, limited, err := q.limit()
	if err != nil {
		return err
	}
	file, st, err := h.openFile(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	var body io.Reader = file
	size := int64(st.Size)
	if isGenerated(file) {
		data, err := readGenerated(file, path)
		if err != nil {
			return err
		}
		size, body = int64(len(data)), strings.NewReader(data)
	}
	if limited && size > limit {
		return apierr.New(http.StatusRequestEntityTooLarge, "payload_too_large", "%s has %d bytes, the limit is %d: read it in parts through a command", shown(path), size, limit)
	}
	start, length, status := int64(0), size, http.StatusOK
	if header := r.Header.Get("Range"); header != "" {
		var partial bool
		start, length, partial, err = parseRange(header, size)
		if err != nil {
			w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", size))
			return err
		}
		if partial {
			status = http.StatusPartialContent
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", start, start+length-1, size))
		}
	}
	if start > 0 {
		if _, err := body.(io.Seeker).Seek(start, io.SeekStart); err != nil {
			return failure(path, err)
		}
	}
	i := info{name: base(path), path: h.absolute(path), stat: st}
	i.stat.Size = uint64(size)
	w.Header().Set("File-Info", base64.StdEncoding.EncodeToString(i.appendJSON(nil)))
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(length, 10))
	w.WriteHeader(status)
	if r.Method == http.MethodHead {
		return nil
	}
	sendExactly(r.Context(), &patientWriter{w, http.NewResponseController(w)}, body, length)
	return nil
}

// patientWriter is a response that fails when the reader stands still for too long.
type patientWriter struct {
	body    io.Writer
	control *http.ResponseController
}

func (p *patientWriter) Write(b []byte) (int, error) {
	_ = p.control.SetWriteDeadline(time.Now().Add(patience)) // not every transport has deadlines; a dead channel ends the write as well
	n, err := p.body.Write(b)
	_ = p.control.SetWriteDeadline(time.Time{})
	return n, err
}

// sendExactly sends the announced bytes. A file that has become shorter, or a read error, breaks the connection: a short body must not look whole.
func sendExactly(ctx context.Context, w io.Writer, body io.Reader, length int64) {
	buf := buffers.Get().(*[64 << 10]byte)
	defer buffers.Put(buf)
	for length > 0 {
		n, err := body.Read(buf[:min(int64(len(buf)), length)])
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				panic(http.ErrAbortHandler)
			}
			length -= int64(n)
		}
		if length > 0 && (err != nil || ctx.Err() != nil) {
			panic(http.ErrAbortHandler)
		}
	}
}

// openFile opens a regular file. Only its opening holds the gate: the bytes of an open file stay what they were when a restore replaces it.
func (h *Handler) openFile(path string) (*os.File, unix.Statx_t, error) {
	leave, err := h.gate.Enter()
	if err != nil {
		return nil, unix.Statx_t{}, err
	}
	defer leave()
	place, st, err := h.openForReading(path)
	if err != nil {
		return nil, st, err
	}
	defer func() { _ = unix.Close(place) }()
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFDIR:
		return nil, st, apierr.Invalid("%s is a directory: list it, or name a file in it", shown(path))
	default:
		return nil, st, apierr.Invalid("%s is no regular file (a socket, pipe or device): only files can be read", shown(path))
	}
	fd, err := reopen(place, unix.O_RDONLY|unix.O_NOCTTY)
	if err != nil {
		return nil, st, failure(path, err)
	}
	// The size of now, in one account with what is read next.
	if st, err = tree.Stat(fd, ""); err != nil {
		_ = unix.Close(fd)
		return nil, st, failure(path, err)
	}
	return os.NewFile(uintptr(fd), path), st, nil
}

// isGenerated tells whether the kernel makes the file's bytes when it is read: its size says nothing then.
func isGenerated(f *os.File) bool {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		return false
	}
	switch fs.Type {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.SECURITYFS_MAGIC, unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC:
		return true
	}
	return false
}

func readGenerated(f *os.File, path string) (string, error) {
	var b strings.Builder
	n, err := io.Copy(&b, io.LimitReader(f, maxGenerated+1))
	if err != nil {
		return "", failure(path, err)
	}
	if n > maxGenerated {
		return "", apierr.New(http.StatusRequestEntityTooLarge, "payload_too_large", "%s is made by the kernel and has more than %d bytes: read it through a command", shown(path), maxGenerated)
	}
	return b.String(), nil
}

// parseRange reads one range of bytes. What is no range of bytes, or several of them, is ignored, as RFC 9110 (14.2) allows.
func parseRange(header string, size int64) (start, length int64, partial bool, err error) {
	unsatisfiable := apierr.New(http.StatusRequestedRangeNotSatisfiable, "range_not_satisfiable", "the range %.100q is outside the file's %d bytes", header, size)
	spec, ok := strings.CutPrefix(header, "bytes=")
	first, last, dash := strings.Cut(strings.TrimSpace(spec), "-")
	if !ok || !dash || strings.Contains(spec, ",") {
		return 0, size, false, nil
	}
	if first == "" {
		n, err := strconv.ParseInt(last, 10, 64)
		switch {
		case err != nil || n < 0:
			return 0, size, false, nil
		case n == 0 || size == 0:
			return 0, 0, false, unsatisfiable
		}
		n = min(n, size)
		return size - n, n, true, nil
	}
	from, err := strconv.ParseInt(first, 10, 64)
	if err != nil || from < 0 {
		return 0, size, false, nil
	}
	to := size - 1
	if last != "" {
		n, err := strconv.ParseInt(last, 10, 64)
		if err != nil || n < from {
			return 0, size, false, nil
		}
		to = min(n, size-1)
	}
	if from >= size {
		return 0, 0, false, unsatisfiable
	}
	return from, to - from + 1, true, nil
}

// base is the name that an answer gives to a path: its last part, "/" for the root.
func base(path string) string {
	path = strings.TrimRight(path, "/")
	if path == "" {
		return "/"
	}
	return path[strings.LastIndexByte(path, '/')+1:]
}

func (h *Handler) stat(w http.ResponseWriter, _ *http.Request, q query) error {
	path, err := q.path("path")
	if err != nil {
		return err
	}
	leave, err := h.gate.Enter()
	if err != nil {
		return err
	}
	defer leave()
	st, err := h.statLink(path)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, info{name: base(path), path: h.absolute(path), stat: st})
	return nil
}

// statLink is the stat of a path, of the link itself where it is one.
func (h *Handler) statLink(path string) (unix.Statx_t, error) {
	dir, name := split(path)
	if name == "" || strings.HasSuffix(path, "/") {
		fd, st, err := h.openForReading(path)
		if err == nil {
			_ = unix.Close(fd)
		}
		return st, err
	}
	if dir == "" {
		dir = "."
	}
	fd, st, err := h.openForReading(dir)
	if err != nil {
		return st, failure(path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	ws, err := h.open()
	if err != nil {
		return st, err
	}
	defer ws.close()
	real, err := tree.Where(fd)
	if err == nil {
		err = ws.checkReadable(strings.TrimSuffix(real, "/")+"/"+name, path)
	}
	if err == nil {
		st, err = tree.Stat(fd, name)
	}
	return st, failure(path, err)
}

func answer(w http.ResponseWriter, status int, i info) {
	b := i.appendJSON(nil)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(status)
	_, _ = w.Write(b)
}

// list streams a directory; the last line says that it is whole.
func (h *Handler) list(w http.ResponseWriter, r *http.Request, q query) error {
	path, err := q.path("path")
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
	place, st, err := h.openForReading(path)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(place) }()
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return apierr.Invalid("%s is no directory: name a directory to list", shown(path))
	}
	fd, err := reopen(place, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return failure(path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	real, err := tree.Where(fd)
	if err != nil {
		return failure(path, err)
	}
	l := lister{header: w.Header(), w: &patientWriter{w, http.NewResponseController(w)}, ctx: r.Context(), dir: fd, path: strings.TrimSuffix(h.absolute(path), "/") + "/"}
	below, inside := ws.within(real)
	l.hidden = func(name string) bool {
		return inside && (tree.IsTemporary(name) || (below == "" && name == tree.Reserved))
	}
	if err := tree.Each(fd, l.add); err != nil {
		if !l.started {
			return failure(path, err)
		}
		panic(http.ErrAbortHandler)
	}
	l.line = fmt.Appendf(l.line, "{\"end\":true,\"count\":%d}\n", l.count)
	l.flush()
	return nil
}

// lister writes entries as lines, in pieces of some kilobytes.
type lister struct {
	header  http.Header
	w       io.Writer
	ctx     context.Context
	dir     int
	path    string
	hidden  func(name string) bool
	line    []byte
	count   int
	started bool
}

func (l *lister) add(e tree.Entry) error {
	if l.hidden(e.Name) {
		return nil
	}
	st, err := tree.Stat(l.dir, e.Name)
	if err == unix.ENOENT {
		return nil // gone since the directory was read
	}
	if err != nil {
		return err
	}
	i := info{name: e.Name, path: l.path + e.Name, stat: st}
	l.line = append(i.appendJSON(l.line), '\n')
	l.count++
	if len(l.line) >= 32<<10 {
		l.flush()
	}
	return l.ctx.Err()
}

func (l *lister) flush() {
	if !l.started {
		l.started = true
		l.header.Set("Content-Type", "application/x-ndjson")
	}
	if _, err := l.w.Write(l.line); err != nil {
		panic(http.ErrAbortHandler)
	}
	l.line = l.line[:0]
}
