// Package archive answers the archive calls of the guest API (init/API.md, "Archives"): it streams the workspace out as a tar, and replaces the
// workspace by one. What it may rely on: the processes are frozen meanwhile; what it may not: that the archive or the workspace is well meant.
package archive

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/gate"
	"agentsandbox.dev/init/internal/tarfmt"
	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

// Processes is what an archive and a restore need from the processes of the sandbox.
type Processes interface {
	// Freeze stops everything but init and its bridges. thaw continues exactly what Freeze stopped; it may be called more than once, from any
	// goroutine, and after KillAll.
	Freeze(ctx context.Context) (thaw func(), err error)
	// KillAll ends every process but init and its bridges, frozen or not, and returns when they are dead.
	KillAll(ctx context.Context) error
	// Reset drops all journals and processes, makes a new boot id and returns it.
	Reset() (bootID string)
}

// Config says where things are; all paths are absolute.
type Config struct {
	Workspace string
	Tmp       string // emptied by a restore
}

const (
	maxManifest    = 1 << 20
	gateWait       = 10 * time.Second
	processesLimit = 10 * time.Second // for a freeze or a kill
)

// patience is how long a transfer may stand still, and how long it may take.
type patience struct {
	stall, total time.Duration
}

// Members of an archive that are init's own.
const (
	manifestName = tree.Reserved + "/manifest.json"
	indexName    = tree.Reserved + "/index.json"
	failureName  = tree.Reserved + "/error.json"
)

// Handler answers the archive calls for one workspace.
type Handler struct {
	config    Config
	gate      *gate.Gate
	processes Processes
	volatile  []string // folders that a restore empties
	ipc       bool     // whether SysV objects are ours to remove
	uid       uint32
	out, in   patience
	step      func(name string) // before each step of an exchange; tests die in it
}

// New makes a Handler.
func New(c Config, g *gate.Gate, p Processes) *Handler {
	h := &Handler{
		config: c, gate: g, processes: p, uid: uint32(os.Geteuid()), step: func(string) {},
		// An archive keeps the sandbox frozen, so its reader has to be quick; a restore ends all processes anyway.
		out: patience{stall: 5 * time.Second, total: time.Minute},
		in:  patience{stall: 15 * time.Second, total: 15 * time.Minute},
	}
	// Only PID 1 has these for itself. On a developer's machine they belong to others, and so does the usual /tmp.
	if os.Getpid() == 1 {
		h.volatile, h.ipc = []string{c.Tmp, "/dev/shm", "/dev/mqueue"}, true
	} else if c.Tmp != os.TempDir() {
		h.volatile = []string{c.Tmp}
	}
	return h
}

// Register adds the calls to mux.
func (h *Handler) Register(mux *http.ServeMux) {
	for pattern, call := range map[string]func(http.ResponseWriter, *http.Request) error{
		"POST /v1/archive": h.archive,
		"POST /v1/restore": h.restore,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := call(w, r); err != nil {
				apierr.Write(w, err)
			}
		})
	}
}

// Index is the last member of an archive.
type Index struct {
	Format      int    `json:"format"`
	Files       int64  `json:"files"`
	Directories int64  `json:"directories"`
	Symlinks    int64  `json:"symlinks"`
	Hardlinks   int64  `json:"hardlinks"`
	Skipped     int64  `json:"skipped"` // sockets, pipes, devices and mount points
	Bytes       int64  `json:"bytes"`   // data of files, holes not counted
	Entries     int64  `json:"entries"` // files, directories, symlinks and hard links
	SHA256      string `json:"sha256"`
}

const indexFormat = 1

// archive streams the workspace.
func (h *Handler) archive(w http.ResponseWriter, r *http.Request) error {
	manifest, err := io.ReadAll(io.LimitReader(r.Body, maxManifest+1))
	if err != nil {
		return apierr.Invalid("the manifest ended early (%v): send it again", err)
	}
	if len(manifest) > maxManifest {
		return apierr.New(http.StatusRequestEntityTooLarge, "payload_too_large", "the manifest has more than %d bytes", maxManifest)
	}
	if !json.Valid(manifest) {
		return apierr.Invalid("the manifest is no JSON")
	}
	release, err := h.gate.Hold(r.Context(), gate.Archiving)
	if err != nil {
		return err
	}
	defer release()
	root, err := openRoot(h.config.Workspace, h.uid)
	if err != nil {
		return err
	}
	defer root.close()
	thaw, err := h.freeze(r.Context())
	if err != nil {
		return err
	}
	defer thaw()

	control := http.NewResponseController(w)
	watch := newWatch(r.Context(), h.out, func(dead bool) {
		thaw()
		if dead {
			_ = control.SetWriteDeadline(time.Now()) // ends a write that nobody reads
		}
	})
	defer watch.stop()
	w.Header().Set("Content-Type", "application/x-tar")
	out := &watchedWriter{w: w, watch: watch}
	tw := tarfmt.NewWriter(out)
	if err := pack(tw, root, manifest, watch); err != nil {
		if out.failed || tw.WriteFile(failureName, failureJSON(err)) != nil || tw.Close() != nil {
			panic(http.ErrAbortHandler) // an archive without its index, and without a regular end of the body
		}
		return nil
	}
	if err := control.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		panic(http.ErrAbortHandler)
	}
	return nil
}

// failureJSON is the member that stands in the place of the index: the answer's status was sent long before.
func failureJSON(err error) []byte {
	code := "internal_error"
	var known *apierr.Error
	if errors.As(err, &known) {
		code = known.Code
	}
	b, err := json.Marshal(map[string]any{"error": map[string]string{"code": code, "message": err.Error()}})
	if err != nil {
		return []byte(`{"error":{"code":"internal_error","message":"the archive failed"}}`)
	}
	return b
}

func (h *Handler) freeze(ctx context.Context) (thaw func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, processesLimit)
	defer cancel()
	thaw, err = h.processes.Freeze(ctx)
	if err != nil {
		return nil, fmt.Errorf("the processes of the sandbox could not be frozen: %w", err)
	}
	return thaw, nil
}

// root is the open workspace.
type root struct {
	fd   int
	stat unix.Statx_t
	uid  uint32 // of the sandbox: whose files are ours
}

func openRoot(path string, uid uint32) (*root, error) {
	fd, err := tree.Open(unix.AT_FDCWD, path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("workspace %s cannot be opened: %w", path, err)
	}
	st, err := tree.Stat(fd, "")
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("workspace %s cannot be examined: %w", path, err)
	}
	return &root{fd, st, uid}, nil
}

func (r *root) close() { _ = unix.Close(r.fd) }

// limits are the query of a restore.
type limits struct {
	bytes, entries, maxBytes int64
}

func parseLimits(r *http.Request) (limits, error) {
	var l limits
	for name, to := range map[string]*int64{"bytes": &l.bytes, "entries": &l.entries, "max_bytes": &l.maxBytes} {
		n, err := strconv.ParseInt(r.URL.Query().Get(name), 10, 64)
		if err != nil || n < 0 {
			return l, apierr.Invalid("%s must be a number, 0 or more: take bytes and entries from the archive's index", name)
		}
		*to = n
	}
	return l, nil
}

// restore replaces the workspace. Until the processes are killed, every failure leaves everything as it was.
func (h *Handler) restore(w http.ResponseWriter, r *http.Request) error {
	want, err := parseLimits(r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), gateWait)
	defer cancel()
	release, err := h.gate.Hold(ctx, gate.Restoring)
	if err != nil {
		return err
	}
	defer release()
	root, err := openRoot(h.config.Workspace, h.uid)
	if err != nil {
		return err
	}
	defer root.close()
	// First what an earlier one has left: its space counts as free then, and a half exchanged workspace is made whole before anything is thrown away.
	if err := recoverRoot(root, h.step); err != nil {
		return err
	}
	if err := checkSpace(root, want); err != nil {
		return err
	}
	thaw, err := h.freeze(r.Context())
	if err != nil {
		return err
	}
	defer thaw()
	s, err := newStaging(root, h.step)
	if err != nil {
		return err
	}
	defer s.close()
	index, dropped, err := h.unpack(w, r, s, want)
	if err == nil {
		err = s.prepare()
	}
	if err == nil {
		err = h.killAll()
	}
	if err != nil {
		s.discard()
		return err
	}
	// From here on the processes are gone, so a failure has to make a new boot id known as well.
	swapped := s.swap()
	if swapped == nil {
		if err := h.clean(); err != nil {
			swapped = fmt.Errorf("the workspace was restored, but %w", err)
		}
	}
	boot := h.processes.Reset()
	w.Header().Set("Sandbox-Boot-Id", boot) // the server has set the one of before
	if swapped != nil {
		return swapped
	}
	answer := map[string]any{"boot_id": boot, "entries": index.Entries, "bytes": index.Bytes}
	if dropped > 0 {
		answer["xattrs_dropped"] = dropped
	}
	apierr.WriteJSON(w, http.StatusOK, answer)
	return nil
}

// killAll has a context of its own: the caller's end must not stop it half way.
func (h *Handler) killAll() error {
	ctx, cancel := context.WithTimeout(context.Background(), processesLimit)
	defer cancel()
	if err := h.processes.KillAll(ctx); err != nil {
		return fmt.Errorf("the processes of the sandbox could not be ended, the workspace is as it was: %w", err)
	}
	return nil
}

// unpack reads the body into the staging folder, within the bounds of time.
func (h *Handler) unpack(w http.ResponseWriter, r *http.Request, s *staging, want limits) (Index, int64, error) {
	control := http.NewResponseController(w)
	watch := newWatch(r.Context(), h.in, func(bool) {
		_ = control.SetReadDeadline(time.Now()) // ends a read for which nothing comes
	})
	defer watch.stop()
	u := &unpacker{root: s.root, in: tarfmt.NewReader(&boundedBody{body: r.Body, left: want.maxBytes, limit: want.maxBytes, watch: watch}), want: want, watch: watch}
	err := u.run(s.new)
	s.unpacked = u.closed
	var known *apierr.Error
	if expired := watch.err(); expired != nil && err != nil && !errors.As(err, &known) {
		err = expired // and not the time-out of the read that it ended
	}
	return u.index, u.dropped, err
}

// boundedBody is a body with a limit.
type boundedBody struct {
	body        io.Reader
	left, limit int64
	watch       *watch
}

func (b *boundedBody) Read(p []byte) (int, error) {
	n, err := b.body.Read(p)
	b.watch.progress()
	if b.left -= int64(n); b.left < 0 {
		return 0, apierr.New(http.StatusRequestEntityTooLarge, "payload_too_large", "the archive has more than the %d bytes that are allowed", b.limit)
	}
	return n, err
}
