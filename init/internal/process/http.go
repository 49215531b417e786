package process

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"agentsandbox.dev/init/internal/apierr"
)

const (
	maxStartBody = 4 << 20
	maxBody      = 1 << 20
	largeBody    = 64 << 10
	maxOutput    = 256 << 10 // of the answer to a start
	maxStartWait = 1000
	maxWait      = 30_000
	maxNumber    = 1 << 62
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
		"PUT /v1/streams/{sid}/processes/{id}":    m.serveSubscribe,
		"DELETE /v1/streams/{sid}/processes/{id}": m.serveUnsubscribe,
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
	if !isID(id) {
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

// readBody reads a whole body. Large ones wait for their turn, so that they cannot take init's memory together; call done when it is used.
func (m *Manager) readBody(w http.ResponseWriter, r *http.Request, limit int64) (body []byte, done func(), err error) {
	done = func() {}
	if r.ContentLength < 0 || r.ContentLength > largeBody {
		select {
		case m.bodies <- struct{}{}:
			done = func() { <-m.bodies }
		case <-r.Context().Done():
			return nil, done, r.Context().Err()
		}
	}
	buffer := bytes.NewBuffer(make([]byte, 0, min(max(r.ContentLength, 0), limit)+bytes.MinRead))
	_, err = buffer.ReadFrom(http.MaxBytesReader(w, r.Body, limit))
	var over *http.MaxBytesError
	switch {
	case err == nil:
		return buffer.Bytes(), done, nil
	case errors.As(err, &over):
		err = apierr.New(http.StatusRequestEntityTooLarge, "payload_too_large", "the body is over %d bytes: send less, or in parts", limit)
	default:
		err = apierr.Invalid("the body ended early: send it again")
	}
	done()
	return nil, func() {}, err
}

func (m *Manager) readJSON(w http.ResponseWriter, r *http.Request, limit int64, into any) error {
	body, done, err := m.readBody(w, r, limit)
	if err != nil {
		return err
	}
	defer done()
	return decode(body, into)
}

// decode is strict: what this version does not know it would not do either.
func decode(body []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		var kind *json.UnmarshalTypeError
		if errors.As(err, &kind) {
			return apierr.Invalid("the body's %q has the wrong type: see the guest API", kind.Field)
		}
		return apierr.Invalid("the body is not the JSON object that this call takes, or has a key that it does not know")
	}
	if _, err := d.Token(); err != io.EOF {
		return apierr.Invalid("something follows the JSON object of the body")
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
	m.tidy()
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
	p, created, err := m.startFromBody(w, r, id)
	if err != nil {
		return err
	}
	m.waitFor(r.Context(), p, time.Duration(wait)*time.Millisecond, func() bool {
		return p.exit != nil || until == "output" && p.journal.next() > 0
	})
	answer, err := m.answerStart(p, query.Get("stream"))
	if err != nil {
		return err
	}
	status := http.StatusOK
	if created {
		status = http.StatusCreated
	}
	apierr.WriteJSON(w, status, answer)
	return nil
}

func (m *Manager) startFromBody(w http.ResponseWriter, r *http.Request, id string) (*Process, bool, error) {
	body, done, err := m.readBody(w, r, maxStartBody)
	if err != nil {
		return nil, false, err
	}
	defer done()
	s := &spec{}
	if err := decode(body, s); err != nil {
		return nil, false, err
	}
	return m.start(r.Context(), id, s)
}

// answerStart takes the output so far and subscribes the stream from there on, at one moment.
func (m *Manager) answerStart(p *Process, sid string) (startAnswer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.gone {
		return startAnswer{}, noProcess(p.id)
	}
	answer := startAnswer{View: p.view(), Output: []outputFrame{}}
	next := p.journal.first
	if next == 0 {
		next = p.journal.from(0, maxOutput, func(kind byte, seq uint64, data []byte) {
			if kind == frameStdout || kind == frameStderr {
				answer.Output = append(answer.Output, outputFrame{seq, kind, data})
			}
		})
	}
	p.sent = max(p.sent, next)
	if p.exit != nil && next == p.journal.next() {
		p.delivered = true // the exit is in the answer itself
	}
	if s := m.streams[sid]; s != nil {
		answer.Subscribed = true
		if !p.delivered {
			s.add(p, next)
		}
	}
	return answer, nil
}

// waitFor waits until ready, for at most d. ready runs under mu.
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

func (m *Manager) writeView(w http.ResponseWriter, p *Process) error {
	m.mu.Lock()
	view, gone := p.view(), p.gone
	m.mu.Unlock()
	if gone {
		return noProcess(p.id)
	}
	apierr.WriteJSON(w, http.StatusOK, view)
	return nil
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
	return m.writeView(w, p)
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
	if m.byID[p.id] == p {
		m.forget(p)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (m *Manager) serveOutput(w http.ResponseWriter, r *http.Request) error {
	p, err := m.find(r)
	if err != nil {
		return err
	}
	from, err := queryNumber(r, "from", 0, maxNumber)
	if err != nil {
		return err
	}
	limit, err := queryNumber(r, "max_bytes", maxBody, maxNumber)
	if err != nil {
		return err
	}
	type numbered struct {
		frame
		seq uint64
	}
	var frames []numbered
	length := 0
	m.mu.Lock()
	p.journal.from(uint64(from), int(min(limit, maxBody)), func(kind byte, seq uint64, data []byte) {
		frames = append(frames, numbered{frame{kind, data}, seq})
		length += frameHeader + len(data)
	})
	m.mu.Unlock()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.Itoa(length))
	out := bufio.NewWriter(w)
	for _, f := range frames {
		_, _ = out.Write(appendFrame(nil, f.kind, p.raw, f.seq, f.data))
	}
	_ = out.Flush() // a client that is gone needs no error
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
	if err := m.readJSON(w, r, maxBody, &body); err != nil {
		return err
	}
	if body.Signal < 1 || body.Signal > 64 {
		return apierr.Invalid("signal must be a number from 1 to 64")
	}
	if body.Scope == "" {
		body.Scope = "process"
	}
	reaped, err := m.signal(p, syscall.Signal(body.Signal), body.Scope)
	if err != nil {
		return err
	}
	if reaped {
		return apierr.Conflict("process %s has exited: there is nothing to signal; kill ends what it left", p.id)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (m *Manager) signal(p *Process, signal syscall.Signal, scope string) (reaped bool, err error) {
	m.children.Lock()
	m.mu.Lock()
	reaped = p.reaped
	m.mu.Unlock()
	if !reaped {
		switch scope {
		case "process":
			_ = syscall.Kill(p.pid, signal)
		case "group":
			_ = syscall.Kill(-p.pid, signal)
		case "tree":
		default:
			err = apierr.Invalid("scope must be process, group or tree")
		}
	}
	m.children.Unlock()
	if err == nil && !reaped && scope == "tree" {
		m.signalTree(p, signal)
	}
	return reaped, err
}

func (m *Manager) serveKill(w http.ResponseWriter, r *http.Request) error {
	p, err := m.find(r)
	if err != nil {
		return err
	}
	var body struct {
		Reason string `json:"reason"`
	}
	if err := m.readJSON(w, r, maxBody, &body); err != nil {
		return err
	}
	why := cause{body.Reason, "it was cancelled"}
	switch body.Reason {
	case "":
		why.reason = reasonCanceled
	case reasonCanceled:
	case reasonTimedOut:
		why.message = "its time was up"
	default:
		return apierr.Invalid("reason must be canceled or timed_out")
	}
	m.kill(p, why)
	m.waitFor(r.Context(), p, killTime, func() bool { return p.exit != nil })
	return m.writeView(w, p)
}

func (m *Manager) serveResize(w http.ResponseWriter, r *http.Request) error {
	p, err := m.find(r)
	if err != nil {
		return err
	}
	var size Window
	if err := m.readJSON(w, r, maxBody, &size); err != nil {
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
	ttl, err := queryNumber(r, "ttl_ms", standardLease.Milliseconds(), maxLease.Milliseconds())
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
	if err := m.readJSON(w, r, maxBody, &body); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, n := range body {
		if p := m.byID[id]; p != nil {
			m.used -= p.journal.acknowledge(n)
		}
	}
	m.room.Broadcast()
	w.WriteHeader(http.StatusNoContent)
	return nil
}
