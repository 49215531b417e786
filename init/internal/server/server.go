// Package server is the HTTP server of the guest: health, resources, shutdown, and the boot id on every answer. Who may connect is in listener.go.
package server

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/gate"
	"agentsandbox.dev/init/internal/process"
	"agentsandbox.dev/init/internal/sys"
)

const (
	// API is the version of init/API.md that is answered.
	API = 1

	maxHeader    = 64 << 10 // a path has at most 4096 bytes, percent-encoded three times that
	shutdownTime = 5 * time.Second
	bootHeader   = "Sandbox-Boot-Id"
)

// Config is what health tells, and where the workspace is.
type Config struct {
	Version   string
	Workspace string
	// AllowPeer says whether a peer may be served; nil is the rule of a sandbox: only what was started from outside.
	AllowPeer func(pid int) bool
	// Shutdown is called after the answer to a shutdown was sent and everything was ended.
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

// Serve answers until the listener is closed.
func (s *Server) Serve(l *net.UnixListener) error {
	// No time limits: an idle channel is kept for long, and the peer is the engine's. A full listener closes the longest idle.
	connections := newConnections()
	h := &http.Server{Handler: http.HandlerFunc(s.answer), MaxHeaderBytes: maxHeader, ConnState: connections.note}
	err := h.Serve(&listener{UnixListener: l, allow: s.config.AllowPeer, connections: connections})
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

func (s *Server) answer(w http.ResponseWriter, r *http.Request) {
	out := &bootWriter{ResponseWriter: w, bootID: s.processes.BootID}
	s.mux.ServeHTTP(out, r)
	out.begin() // an answer with an empty body has written nothing
}

// bootWriter adds the boot id when the answer begins: a restore makes a new one, which its own answer has to carry.
type bootWriter struct {
	http.ResponseWriter
	bootID func() string
	begun  bool
}

func (w *bootWriter) WriteHeader(status int) {
	w.begin()
	w.ResponseWriter.WriteHeader(status)
}

func (w *bootWriter) Write(data []byte) (int, error) {
	w.begin()
	return w.ResponseWriter.Write(data)
}

func (w *bootWriter) begin() {
	if !w.begun {
		w.begun = true
		w.Header().Set(bootHeader, w.bootID())
	}
}

// ReadFrom keeps the fast ways that the connection has for copying.
func (w *bootWriter) ReadFrom(r io.Reader) (int64, error) {
	w.begin()
	return io.Copy(w.ResponseWriter, r)
}

// Unwrap lets http.ResponseController reach the connection.
func (w *bootWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

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
		defer sys.Recover("a shutdown")
		ctx, cancel := context.WithTimeout(context.Background(), shutdownTime)
		defer cancel()
		_ = s.processes.KillAll(ctx) // what is left goes with PID 1
		if s.config.Shutdown != nil {
			s.config.Shutdown()
			return
		}
		os.Exit(0)
	}()
}
