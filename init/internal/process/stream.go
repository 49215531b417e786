package process

import (
	"net/http"
	"time"

	"agentsandbox.dev/init/internal/apierr"
)

const (
	heartbeatEvery = 15 * time.Second
	streamStall    = 30 * time.Second // a reader that takes nothing for that long is given up
	burst          = 128 << 10        // bytes of one write to an event stream
	fairShare      = 16 << 10         // of a burst, for each process at least
)

// stream is the one event stream of a client. Guarded by the manager's mu.
type stream struct {
	next  map[*Process]uint64 // the number of the next frame to send
	order []*Process
	work  chan struct{} // holds one token while there may be something to send
	done  chan struct{}
	abort func() // ends a write that nobody takes
	ended bool
}

func (s *stream) poke() {
	select {
	case s.work <- struct{}{}:
	default:
	}
}

func (s *stream) end() {
	if !s.ended {
		s.ended = true
		close(s.done)
		s.abort()
	}
}

func (s *stream) add(p *Process, from uint64) {
	if _, known := s.next[p]; !known {
		s.order = append(s.order, p)
	}
	s.next[p] = from
	p.streams[s] = struct{}{}
	s.poke()
}

func (s *stream) remove(p *Process) {
	delete(s.next, p)
	delete(p.streams, s)
	for i, other := range s.order {
		if other == p {
			s.order = append(s.order[:i], s.order[i+1:]...)
			return
		}
	}
}

// collect takes the frames that are to be sent now, a fair share of each process.
func (s *stream) collect(out []byte) []byte {
	share := max(burst/max(1, len(s.order)), fairShare)
	for _, p := range append([]*Process(nil), s.order...) {
		if len(out) >= burst {
			s.poke()
			break
		}
		next := p.journal.from(s.next[p], share, func(kind byte, seq uint64, data []byte) { out = appendFrame(out, kind, p.raw, seq, data) })
		s.next[p] = next
		p.sent = max(p.sent, next)
		switch {
		case p.exit != nil && next == p.journal.next():
			p.delivered = true
			s.remove(p)
		case next < p.journal.next():
			s.poke()
		}
	}
	// Who came first in this round comes last in the next.
	if len(s.order) > 1 {
		s.order = append(s.order[1:], s.order[0])
	}
	return out
}

// serveStream sends frames until the client goes, another connection takes over, or a reset ends everything.
func (m *Manager) serveStream(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r, "sid", "stream")
	if err != nil {
		return err
	}
	control := http.NewResponseController(w)
	defer func() { _ = control.SetWriteDeadline(time.Time{}) }()
	s := &stream{next: map[*Process]uint64{}, work: make(chan struct{}, 1), done: make(chan struct{})}
	s.abort = func() { _ = control.SetWriteDeadline(time.Now()) }
	m.mu.Lock()
	if old := m.streams[id]; old != nil {
		old.end()
	}
	m.streams[id] = s
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.streams[id] == s {
			delete(m.streams, id)
		}
		for p := range s.next {
			delete(p.streams, s)
		}
	}()

	w.Header().Set("Content-Type", "application/octet-stream")
	w.WriteHeader(http.StatusOK)
	if control.Flush() != nil {
		return nil
	}
	heartbeat := time.NewTicker(heartbeatEvery)
	defer heartbeat.Stop()
	var out []byte
	for {
		out = out[:0]
		select {
		case <-s.work:
			m.mu.Lock()
			out = s.collect(out)
			m.mu.Unlock()
			m.room.Broadcast() // what was sent may be let go
		case <-heartbeat.C:
			out = appendFrame(out, frameHeartbeat, [16]byte{}, 0, nil)
		case <-s.done:
			return nil
		case <-r.Context().Done():
			return nil
		}
		if len(out) == 0 {
			continue
		}
		if !m.extend(s, control) {
			return nil
		}
		if _, err := w.Write(out); err != nil || control.Flush() != nil {
			return nil
		}
		if cap(out) > 2*burst {
			out = nil
		}
	}
}

// extend gives a write its time, unless the stream was ended meanwhile: then the deadline in the past must stay.
func (m *Manager) extend(s *stream, control *http.ResponseController) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !s.ended {
		_ = control.SetWriteDeadline(time.Now().Add(streamStall))
	}
	return !s.ended
}

func (m *Manager) serveSubscribe(w http.ResponseWriter, r *http.Request) error {
	from, err := queryNumber(r, "from", 0, maxNumber)
	if err != nil {
		return err
	}
	return m.withStream(r, func(s *stream, p *Process) error {
		if uint64(from) > p.journal.next() {
			return apierr.Invalid("process %s has no frame %d yet: the next one is %d", p.id, from, p.journal.next())
		}
		s.add(p, uint64(from))
		w.WriteHeader(http.StatusNoContent)
		return nil
	})
}

func (m *Manager) serveUnsubscribe(w http.ResponseWriter, r *http.Request) error {
	return m.withStream(r, func(s *stream, p *Process) error {
		s.remove(p)
		w.WriteHeader(http.StatusNoContent)
		return nil
	})
}

// withStream calls f under mu.
func (m *Manager) withStream(r *http.Request, f func(*stream, *Process) error) error {
	sid, err := pathID(r, "sid", "stream")
	if err != nil {
		return err
	}
	p, err := m.find(r)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.streams[sid]
	if s == nil {
		return apierr.Conflict("the event stream %s is not open: open it with GET first", sid)
	}
	if p.gone {
		return noProcess(p.id)
	}
	return f(s, p)
}
