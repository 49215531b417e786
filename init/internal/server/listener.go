package server

import (
	"errors"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"agentsandbox.dev/init/internal/sys"
)

const (
	// Socket is the abstract socket: no file that sandboxed code could unlink or bind again, no port.
	Socket = "@sandbox-init"

	// MaxConnections is how many channels are served at once. Each may hold a thread in a blocking call, and threads are made at start.
	MaxConnections = 11

	acceptPause = 10 * time.Millisecond
)

// Listen binds the socket. Do it before any user code can run.
func Listen(name string) (*net.UnixListener, error) {
	return net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
}

// cameFromOutside: a process that the engine starts in a sandbox has parent 0; a child of sandboxed code never has.
func cameFromOutside(pid int) bool {
	p, ok := sys.Read(pid)
	return ok && p.Outside()
}

// listener serves allowed peers only.
type listener struct {
	*net.UnixListener
	allow       func(pid int) bool
	connections *connections
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil, err
		}
		if err != nil {
			time.Sleep(acceptPause) // out of descriptors: the next one may find room
			continue
		}
		pid, err := peer(c)
		if err != nil || !l.allow(pid) || !l.connections.makeRoom() {
			_ = c.Close()
			continue
		}
		return c, nil
	}
}

// peer is the process that connected; 0 when it is in no pid namespace that can be seen from here.
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

// connections knows what is open, and since when it waits for a request.
type connections struct {
	mu   sync.Mutex
	open map[net.Conn]time.Time // zero while it serves one
}

func newConnections() *connections { return &connections{open: map[net.Conn]time.Time{}} }

// note is the server's ConnState.
func (c *connections) note(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch state {
	case http.StateNew, http.StateIdle:
		c.open[conn] = time.Now()
	case http.StateActive:
		c.open[conn] = time.Time{}
	default:
		delete(c.open, conn)
	}
}

// makeRoom closes the longest idle connection when there are too many; false when all are in use.
func (c *connections) makeRoom() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.open) < MaxConnections {
		return true
	}
	var oldest net.Conn
	var since time.Time
	for conn, idle := range c.open {
		if !idle.IsZero() && (oldest == nil || idle.Before(since)) {
			oldest, since = conn, idle
		}
	}
	if oldest == nil {
		return false
	}
	delete(c.open, oldest)
	_ = oldest.Close()
	return true
}
