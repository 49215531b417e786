package process

import (
	"testing"

	"agentsandbox.dev/init/internal/gate"
)

func newTestManager(t *testing.T, budget int) *Manager {
	t.Helper()
	m, err := New(Config{Workspace: t.TempDir(), Budget: budget}, &gate.Gate{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.null.Close() })
	return m
}

func fill(m *Manager, p *Process, bytes int) {
	for ; bytes > 0; bytes -= smallestRead {
		m.add(p, frame{frameStdout, make([]byte, smallestRead)})
	}
}

func TestAReaderWhoHasNothingToAcknowledgeYetIsNotStarvedByOthers(t *testing.T) {
	m := newTestManager(t, 200<<10)
	p, other := &Process{lease: "a"}, &Process{lease: "b"}
	fill(m, other, 100<<10)
	fill(m, p, 100<<10)
	if room := m.roomFor(p); room != 0 {
		t.Fatalf("room of %d though nothing was sent", room)
	}
	p.sent = p.journal.next()
	if room := m.roomFor(p); room < smallestRead {
		t.Fatalf("room of %d though all of it was sent", room)
	}
	for p.journal.window() < maxJournal-smallestRead-frameOverhead {
		if m.roomFor(p) == 0 {
			t.Fatalf("no room at a window of %d", p.journal.window())
		}
		fill(m, p, smallestRead)
		p.sent = p.journal.next()
	}
	fill(m, p, smallestRead)
	p.sent = p.journal.next()
	if room := m.roomFor(p); room != 0 {
		t.Fatalf("room of %d beyond the window that a reader may owe", room)
	}
	m.used -= p.journal.acknowledge(p.journal.next())
	if p.journal.window() != 0 || m.roomFor(p) < smallestRead {
		t.Fatalf("window %d after all was acknowledged", p.journal.window())
	}
}

func TestABackgroundProcessAlwaysHasRoomAndLosesItsOldest(t *testing.T) {
	m := newTestManager(t, 64<<10)
	hog, p := &Process{lease: "a"}, &Process{}
	fill(m, hog, 128<<10)
	fill(m, p, 20<<10)
	if room := m.roomFor(p); room != smallestRead || p.journal.first == 0 {
		t.Fatalf("room of %d, first frame %d", room, p.journal.first)
	}
}

func TestADroppedProcessHasNoRoom(t *testing.T) {
	m := newTestManager(t, 64<<10)
	if room := m.roomFor(&Process{gone: true}); room != 0 {
		t.Fatalf("room of %d", room)
	}
}
