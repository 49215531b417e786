package process

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentsandbox.dev/init/internal/apierr"
)

const (
	maxStartBody = 4 << 20
	maxBody      = 1 << 20
	maxOutput    = 256 << 10
	maxStartWait = 1000
	maxWait      = 30_000
	stdinWait    = time.Second
)

type handler func(http.ResponseWriter, *http.Request) error

// Register adds the calls to mux.
func (m *Manager) Register(mux *http.ServeMux) {
	for pattern, call := range map[string]handler{
		"PUT /v1/processes/{id}":                  m.serveStart,
		"GET /v1/processes":                       m.serveList,
		"GET /v1/processes/{id}":                  m.serveGet,
		"DELETE /v1/processes/{id}":               m.serveForget,
		"GET /v1/processes/{id}/output":           m.serveOutput,
		"POST /v1/processes/{id}/signal":          m.serveSignal,
		"POST /v1/processes/{id}/kill":            m.serveKill,
		"PUT /v1/processes/{id}/stdin":            m.serveStdin,
		"POST /v1/processes/{id}/resize":          m.serveResize,
		"POST /v1/leases/{lease}":                 m.serveLease,
		"POST /v1/acks":                           m.serveAcks,
		"GET /v1/streams/{sid}":                   m.serveStream,
		"PUT /v1/streams/{sid}/processes/{id}":    m.subscribe,
		"DELETE /v1/streams/{sid}/processes/{id}": m.unsubscribe,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := call(w, r); err != nil {
				apierr.Write(w, err)
			}
		})
	}
}

func noProcess(id string) error {
	return apierr.New(http.StatusNotFound, "no_such_process", "no process has the id %s: it was never started, or was forgotten after its end", id)
}

func pathID(r *http.Request, name, what string) (string, error) {
	id := r.PathValue(name)
	if !idPattern.MatchString(id) {
		return "", apierr.Invalid("a %s id is 32 lower-case hex characters", what)
	}
	return id, nil
}

func queryNumber(r *http.Request, name string, standard, limit int64) (int64, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return standard, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || n > limit {
		return 0, apierr.Invalid("%s must be a number from 0 to %d", name, limit)
	}
	return n, nil
}

func decode(w http.ResponseWriter, r *http.Request, limit int64, into any) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	var over *http.MaxBytesError
	if errors.As(err, &over) {
		return apierr.New(http.StatusRequestEntityTooLarge, "payload_too_large", "the body is over %d bytes", limit)
	}
	if err != nil {
		return apierr.Invalid("the body ended early: send it again")
	}
	if err := json.Unmarshal(body, into); err != nil {
		return apierr.Invalid("the body is not the JSON that this call takes")
	}
	return nil
}

func (m *Manager) find(r *http.Request) (*Process, error) {
	id, err := pathID(r, "id", "process")
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.byID[id]; p != nil {
		return p, nil
	}
	return nil, noProcess(id)
}

type outputFrame struct {
	Seq  uint64 `json:"seq"`
	FD   byte   `json:"fd"`
	Data []byte `json:"data"`
}

type startAnswer struct {
	View
	Output     []outputFrame `json:"output"`
	Subscribed bool          `json:"subscribed"`
}

func (m *Manager) serveStart(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r, "id", "process")
	if err != nil {
		return err
	}
	wait, err := queryNumber(r, "wait_ms", 0, maxStartWait)
	if err != nil {
		return err
	}
	query := r.URL.Query()
	until := query.Get("wait_for")
	if until != "" && until != "exit" && until != "output" {
		return apierr.Invalid("wait_for must be exit or output")
	}
	var s spec
	if err := decode(w, r, maxStartBody, &s); err != nil {
		return err
	}
	if err := m.unfrozen(r.Context()); err != nil {
		return err
	}
	p, created, err := m.enter(id, s)
	if err != nil {
		return err
	}
	m.waitFor(r.Context(), p, time.Duration(wait)*time.Millisecond, func() bool {
		return p.exit != nil || until == "output" && p.journal.next() > 0
	})

	m.mu.Lock()
	answer := startAnswer{View: p.view(), Output: []outputFrame{}}
	next := p.journal.first
	if next == 0 {
		next = p.journal.from(0, maxOutput, func(kind byte, seq uint64, data []byte) {
			if kind == frameStdout || kind == frameStderr {
				answer.Output = append(answer.Output, outputFrame{seq, kind, data})
			}
		})
	}
	if p.exit != nil && next == p.journal.next() {
		p.delivered = true
		next-- // the exit frame is not in the answer's output: a subscriber still gets it
	}
	if s := m.streams[query.Get("stream")]; s != nil {
		answer.Subscribed = true
		if !p.delivered {
			s.add(p, next)
		}
	}
	m.mu.Unlock()
	status := http.StatusOK
	if created {
		status = http.StatusCreated
	}
	apierr.WriteJSON(w, status, answer)
	return nil
}

// enter starts a process unless a restore holds the sandbox.
func (m *Manager) enter(id string, s spec) (*Process, bool, error) {
	leave, err := m.gate.Enter()
	if err != nil {
		return nil, false, err
	}
	defer leave()
	return m.start(id, s)
}

// waitFor waits until ready, for at most d. ready runs under the lock.
func (m *Manager) waitFor(ctx context.Context, p *Process, d time.Duration, ready func() bool) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		m.mu.Lock()
		if ready() || p.gone {
			m.mu.Unlock()
			return
		}
		changed := p.wait()
		m.mu.Unlock()
		select {
		case <-changed:
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

func (m *Manager) writeView(w http.ResponseWriter, p *Process) {
	m.mu.Lock()
	view := p.view()
	m.mu.Unlock()
	apierr.WriteJSON(w, http.StatusOK, view)
}

func (m *Manager) serveList(w http.ResponseWriter, _ *http.Request) error {
	m.mu.Lock()
	m.tidy()
	views := make([]View, 0, len(m.order))
	for _, p := range m.order {
		views = append(views, p.view())
	}
	m.mu.Unlock()
	apierr.WriteJSON(w, http.StatusOK, map[string]any{"processes": views})
	return nil
}

func (m *Manager) serveGet(w http.ResponseWriter, r *http.Request) error {
	p, err := m.find(r)
	if err != nil {
		return err
	}
	wait, err := queryNumber(r, "wait_ms", 0, maxWait)
	if err != nil {
		return err
	}
	m.waitFor(r.Context(), p, time.Duration(wait)*time.Millisecond, func() bool { return p.exit != nil })
	m.writeView(w, p)
	return nil
}

func (m *Manager) serveForget(w http.ResponseWriter, r *http.Request) error {
	p, err := m.find(r)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.exit == nil {
		return apierr.Conflict("process %s is still running: kill it first, or wait", p.id)
	}
	m.forget(p)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (m *Manager) serveOutput(w http.ResponseWriter, r *http.Request) error {
	p, err := m.find(r)
	if err != nil {
		return err
	}
	from, err := queryNumber(r, "from", 0, 1<<62)
	if err != nil {
		return err
	}
	limit, err := queryNumber(r, "max_bytes", maxBody, 8<<20)
	if err != nil {
		return err
	}
	var out []byte
	m.mu.Lock()
	p.journal.from(uint64(from), int(limit), func(kind byte, seq uint64, data []byte) { out = appendFrame(out, kind, p.raw, seq, data) })
	m.mu.Unlock()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.Itoa(len(out)))
	_, _ = w.Write(out)
	return nil
}

func (m *Manager) serveSignal(w http.ResponseWriter, r *http.Request) error {
	p, err := m.find(r)
	if err != nil {
		return err
	}
	var body struct {
		Signal int    `json:"signal"`
		Scope  string `json:"scope"`
	}
	if err := decode(w, r, maxBody, &body); err != nil {
		return err
	}
	if body.Signal < 1 || body.Signal > 64 {
		return apierr.Invalid("signal must be a number from 1 to 64")
	}
	signal := syscall.Signal(body.Signal)
	m.mu.Lock()
	reaped := p.reaped
	if !reaped {
		switch body.Scope {
		case "", "process":
			_ = syscall.Kill(p.pid, signal)
		case "group":
			_ = syscall.Kill(-p.pid, signal)
		case "tree":
		default:
			m.mu.Unlock()
			return apierr.Invalid("scope must be process, group or tree")
		}
	}
	m.mu.Unlock()
	if reaped {
		return apierr.Conflict("process %s has exited: there is nothing to signal", p.id)
	}
	if body.Scope == "tree" {
		t := newTree(p)
		for _, one := range t.scan() {
			m.send(idOf(one), signal)
		}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (m *Manager) serveKill(w http.ResponseWriter, r *http.Request) error {
	p, err := m.find(r)
	if err != nil {
		return err
	}
	body := struct {
		Reason string `json:"reason"`
	}{}
	if err := decode(w, r, maxBody, &body); err != nil {
		return err
	}
	switch body.Reason {
	case "":
		body.Reason = reasonCanceled
	case reasonCanceled, reasonTimedOut:
	default:
		return apierr.Invalid("reason must be canceled or timed_out")
	}
	m.kill(p, body.Reason)
	m.waitFor(r.Context(), p, killTime, func() bool { return p.exit != nil })
	m.writeView(w, p)
	return nil
}

func (m *Manager) serveStdin(w http.ResponseWriter, r *http.Request) error {
	p, err := m.find(r)
	if err != nil {
		return err
	}
	offset, err := queryNumber(r, "offset", 0, 1<<62)
	if err != nil {
		return err
	}
	eof := r.URL.Query().Get("eof") == "1"
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		return apierr.Invalid("input must be at most %d bytes a call, and whole: send it in parts", maxBody)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if offset > p.stdinSeen {
		return apierr.Conflict("input up to offset %d is missing: send it first", p.stdinSeen)
	}
	skip := min(p.stdinSeen-offset, int64(len(data)))
	data = data[skip:]
	if p.stdin == nil {
		if len(data) == 0 {
			apierr.WriteJSON(w, http.StatusOK, map[string]int64{"offset": p.stdinSeen})
			return nil
		}
		return apierr.Conflict("the input of process %s is closed: it has exited, was started without stdin, or its end was sent", p.id)
	}
	if len(data) > 0 {
		input := p.stdin
		// Writing may wait: not under the lock. Two writers at once both begin at the same offset; the loser's bytes are refused below.
		seen := p.stdinSeen
		m.mu.Unlock()
		_ = input.SetWriteDeadline(time.Now().Add(stdinWait))
		n, werr := input.Write(data)
		m.mu.Lock()
		if p.stdinSeen != seen {
			return apierr.Conflict("two writers sent input of process %s at once: one of them must stop", p.id)
		}
		p.stdinSeen += int64(n)
		if werr != nil && !errors.Is(werr, os.ErrDeadlineExceeded) {
			p.closeInput()
			return apierr.Conflict("process %s has closed its input", p.id)
		}
		data = data[n:]
	}
	if eof && len(data) == 0 && !p.stdinEOF {
		p.stdinEOF = true
		if p.pty != nil {
			_, _ = p.pty.Write([]byte{4}) // what a terminal's user types for the end of input
		}
		p.closeInput()
	}
	apierr.WriteJSON(w, http.StatusOK, map[string]int64{"offset": p.stdinSeen})
	return nil
}

func (m *Manager) serveResize(w http.ResponseWriter, r *http.Request) error {
	p, err := m.find(r)
	if err != nil {
		return err
	}
	var size Window
	if err := decode(w, r, maxBody, &size); err != nil {
		return err
	}
	if size.Rows == 0 || size.Cols == 0 {
		return apierr.Invalid("rows and cols must be over 0")
	}
	if p.pty == nil {
		return apierr.Conflict("process %s has no terminal: start it with pty", p.id)
	}
	if err := resize(p.pty, size); err != nil {
		return apierr.Conflict("process %s has exited: its terminal is gone", p.id)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (m *Manager) serveLease(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r, "lease", "lease")
	if err != nil {
		return err
	}
	ttl, err := queryNumber(r, "ttl_ms", 30_000, 600_000)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.attachedTo(id)
	if n == 0 || m.leases[id] == nil {
		return apierr.NotFound("no running process has the lease %s: it ran out, or all of them have ended", id)
	}
	m.renew(id, time.Duration(ttl)*time.Millisecond)
	apierr.WriteJSON(w, http.StatusOK, map[string]int{"processes": n})
	return nil
}

func (m *Manager) serveAcks(w http.ResponseWriter, r *http.Request) error {
	var body map[string]uint64
	if err := decode(w, r, maxBody, &body); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, n := range body {
		if p := m.byID[id]; p != nil {
			m.used -= p.journal.drop(n)
		}
	}
	m.room.Broadcast()
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// openPTY opens a terminal; the master's end is not blocking, so that no thread waits on it.
func openPTY(size Window) (master, slave *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	master = os.NewFile(uintptr(fd), "ptmx")
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		_ = master.Close()
		return nil, nil, err
	}
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		_ = master.Close()
		return nil, nil, errno
	}
	slave = os.NewFile(peer, "pts")
	if err := resize(master, size); err != nil {
		_ = master.Close()
		_ = slave.Close()
		return nil, nil, err
	}
	return master, slave, nil
}

func resize(master *os.File, size Window) error {
	raw, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var failure error
	err = raw.Control(func(fd uintptr) {
		failure = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols})
	})
	if err == nil {
		err = failure
	}
	return err
}
