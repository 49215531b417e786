// Package server is the HTTP server of the guest: who may connect, the boot id on every answer, health and shutdown.
package server

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/gate"
	"agentsandbox.dev/init/internal/process"
	"agentsandbox.dev/init/internal/sys"
)

const (
	// Socket is the abstract socket: no file that sandboxed code could unlink or bind again, no port.
	Socket = "@sandbox-init"
	// API is the version of init/API.md that is answered.
	API = 1

	maxConnections = 8
)

// Config is what health tells, and where the workspace is.
type Config struct {
	Version   string
	Workspace string
	// AllowPeer says whether a peer may be served; nil is the rule of a sandbox: only what was started from outside.
	AllowPeer func(pid int) bool
	// Shutdown is called after the answer to a shutdown was sent.
	Shutdown func()
}

// Server answers the guest API.
type Server struct {
	config    Config
	gate      *gate.Gate
	processes *process.Manager
	started   time.Time
	mux       *http.ServeMux
}

// New makes a server; register the calls of other packages on Mux.
func New(c Config, g *gate.Gate, p *process.Manager) *Server {
	s := &Server{config: c, gate: g, processes: p, started: time.Now(), mux: http.NewServeMux()}
	if s.config.AllowPeer == nil {
		s.config.AllowPeer = cameFromOutside
	}
	p.Register(s.mux)
	s.mux.HandleFunc("GET /v1/health", s.health)
	s.mux.HandleFunc("GET /v1/resources", s.resources)
	s.mux.HandleFunc("POST /v1/shutdown", s.shutdown)
	s.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		apierr.Write(w, apierr.NotFound("%s %s is no call of this API", r.Method, r.URL.Path))
	})
	return s
}

// Mux is where the calls are registered.
func (s *Server) Mux() *http.ServeMux { return s.mux }

// cameFromOutside: a process that the engine starts in a sandbox has parent 0; a child of sandboxed code never has.
func cameFromOutside(pid int) bool {
	p, ok := sys.Read(pid)
	return ok && pid > 1 && p.PPID == 0
}

// Listen binds the socket. Do it before any user code can run.
func Listen(name string) (*net.UnixListener, error) {
	return net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
}

// Serve answers until the listener is closed.
func (s *Server) Serve(l *net.UnixListener) error {
	h := &http.Server{
		Handler:           http.HandlerFunc(s.answer),
		ReadHeaderTimeout: 0, // an idle channel is kept for long; the peer is ours
		MaxHeaderBytes:    64 << 10,
	}
	err := h.Serve(&listener{UnixListener: l, server: s, places: make(chan struct{}, maxConnections)})
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

func (s *Server) answer(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Sandbox-Boot-Id", s.processes.BootID())
	s.mux.ServeHTTP(w, r)
}

// listener serves allowed peers only, and not more at once than there are threads for their blocking calls.
type listener struct {
	*net.UnixListener
	server *Server
	places chan struct{}
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		l.places <- struct{}{}
		c, err := l.AcceptUnix()
		if err != nil {
			<-l.places
			if errors.Is(err, net.ErrClosed) {
				return nil, err
			}
			// Out of descriptors: the next one may find room.
			time.Sleep(10 * time.Millisecond)
			continue
		}
		pid, err := peer(c)
		if err != nil || !l.server.config.AllowPeer(pid) {
			_ = c.Close()
			<-l.places
			continue
		}
		remove := l.server.processes.AddPeer(pid)
		return &connection{UnixConn: c, closed: func() { remove(); <-l.places }}, nil
	}
}

type connection struct {
	*net.UnixConn
	closed func()
}

func (c *connection) Close() error {
	err := c.UnixConn.Close()
	if err == nil {
		c.closed()
	}
	return err
}

func peer(c *net.UnixConn) (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var failure error
	if err := raw.Control(func(fd uintptr) { cred, failure = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if failure != nil {
		return 0, failure
	}
	return int(cred.Pid), nil
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	apierr.WriteJSON(w, http.StatusOK, map[string]any{
		"version": s.config.Version, "api": API, "boot_id": s.processes.BootID(), "arch": runtime.GOARCH,
		"uptime_ms": time.Since(s.started).Milliseconds(), "state": s.gate.State(), "processes": s.processes.Running(),
	})
}

func (s *Server) resources(w http.ResponseWriter, _ *http.Request) {
	workspace := map[string]any{"bytes": nil, "free": nil, "inodes": nil, "inodes_free": nil}
	var st unix.Statfs_t
	if unix.Statfs(s.config.Workspace, &st) == nil {
		size := uint64(st.Bsize)
		workspace = map[string]any{"bytes": st.Blocks * size, "free": st.Bavail * size, "inodes": st.Files, "inodes_free": st.Ffree}
	}
	apierr.WriteJSON(w, http.StatusOK, map[string]any{
		"memory":    map[string]any{"limit": sys.MemoryLimit(), "current": sys.MemoryCurrent(), "oom_kills": sys.OOMKills()},
		"pids":      map[string]any{"limit": sys.PidsLimit(), "current": sys.PidsCurrent()},
		"cpu":       map[string]any{"usage_ns": sys.CPUNanoseconds()},
		"workspace": workspace,
		"init":      sys.Self(runtime.NumGoroutine()),
	})
}

func (s *Server) shutdown(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusNoContent)
	_ = http.NewResponseController(w).Flush()
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = s.processes.KillAll(ctx)
		if s.config.Shutdown != nil {
			s.config.Shutdown()
			return
		}
		os.Exit(0)
	}()
}

// Detach makes this process one that its own user can neither trace nor read; it must be the first thing it does.
func Detach() {
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	// Every channel, pipe and child costs descriptors: take what the engine allows.
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) == nil && limit.Cur < limit.Max {
		limit.Cur = limit.Max
		_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit)
	}
}
