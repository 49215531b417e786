package process

import (
	"context"
	"errors"
	"net/http"
	"os"
	"time"

	"agentsandbox.dev/init/internal/apierr"
)

const (
	stdinWait = time.Second
	endOfText = 4 // what the user of a terminal types for the end of input
)

// serveStdin writes to the input of a process. Repeating a call is safe: bytes before the current offset are skipped.
func (m *Manager) serveStdin(w http.ResponseWriter, r *http.Request) error {
	p, err := m.find(r)
	if err != nil {
		return err
	}
	offset, err := queryNumber(r, "offset", 0, maxNumber)
	if err != nil {
		return err
	}
	data, done, err := m.readBody(w, r, maxBody)
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := context.WithTimeout(r.Context(), stdinWait)
	defer cancel()
	select {
	case p.input <- struct{}{}:
		defer func() { <-p.input }()
		if err := m.write(p, offset, data, r.URL.Query().Get("eof") == "1"); err != nil {
			return err
		}
	case <-ctx.Done(): // another call is still writing: like a full pipe
	}
	m.mu.Lock()
	seen := p.stdinSeen
	m.mu.Unlock()
	apierr.WriteJSON(w, http.StatusOK, map[string]int64{"offset": seen})
	return nil
}

// write writes what is new of data. Call it with the token of p.input.
func (m *Manager) write(p *Process, offset int64, data []byte, eof bool) error {
	m.mu.Lock()
	seen, input, isTerminal := p.stdinSeen, p.stdin, p.stdin != nil && p.stdin == p.pty
	m.mu.Unlock()
	if offset > seen {
		return apierr.Conflict("input of process %s from offset %d on is missing: send it first", p.id, seen)
	}
	data = data[min(seen-offset, int64(len(data))):]
	if input == nil {
		if len(data) == 0 {
			return nil
		}
		return apierr.Conflict("the input of process %s is closed: it has exited, was started without stdin, or its end was sent", p.id)
	}
	n, err := writeSoon(input, data)
	m.mu.Lock()
	p.stdinSeen += int64(n)
	if err != nil {
		p.closeInput()
	}
	m.mu.Unlock()
	if err != nil {
		return apierr.Conflict("process %s does not read its input any more (%s)", p.id, errnoText(err))
	}
	if !eof || n < len(data) {
		return nil
	}
	if isTerminal {
		if n, err := writeSoon(input, []byte{endOfText}); n == 0 && err == nil {
			return nil // no room now: the caller sees by the offset only that its bytes were taken, so it has to be able to send the end again
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	p.closeInput()
	return nil
}

// writeSoon writes what goes within a second; a full pipe is no error.
func writeSoon(file *os.File, data []byte) (int, error) {
	if len(data) == 0 {
		return 0, nil
	}
	_ = file.SetWriteDeadline(time.Now().Add(stdinWait))
	n, err := file.Write(data)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = nil
	}
	return n, err
}
