package process

import (
	"sort"

	"agentsandbox.dev/init/internal/sys"
)

// identity tells a process from a later one with the same pid.
type identity struct {
	pid   int
	start uint64
}

func idOf(p sys.Proc) identity { return identity{p.PID, p.Start} }

// tree is what belongs to one command: its session, its group, their descendants, whatever carries its mark in the environment, and orphans that
// can be nobody else's.
type tree struct {
	m       *Manager
	command *Process
	seen    map[identity]bool // belongs to it; also after its parent died
	marks   map[identity]sys.Mark
	alive   []sys.Proc
	stopped map[identity]bool // of all processes, at the last look
}

func (m *Manager) treeOf(p *Process) *tree {
	return &tree{m: m, command: p, seen: map[identity]bool{}, marks: map[identity]sys.Mark{}}
}

// scan looks at all processes, sets alive, and returns the members that were not known before.
func (t *tree) scan() (fresh []sys.Proc) {
	all, err := sys.Scan()
	if err != nil {
		return nil
	}
	owns := t.numbers(all)
	t.alive, t.stopped = t.alive[:0], map[identity]bool{}
	for _, p := range all {
		if p.Stopped() {
			t.stopped[idOf(p)] = true
		}
	}
	member := map[int]bool{}
	join := func(p sys.Proc) {
		member[p.PID] = true
		if !t.seen[idOf(p)] {
			t.seen[idOf(p)] = true
			if !p.Dead() {
				fresh = append(fresh, p)
			}
		}
		if !p.Dead() {
			t.alive = append(t.alive, p)
		}
	}
	// A child's pid may be lower than its parent's after a wrap: repeat until nothing is added.
	grow := func(belongs func(sys.Proc) bool) {
		for added := true; added; {
			added = false
			for _, p := range all {
				if !p.Outside() && !member[p.PID] && (t.seen[idOf(p)] || member[p.PPID] || belongs(p)) {
					join(p)
					added = true
				}
			}
		}
	}
	grow(func(p sys.Proc) bool { return owns(p) || !p.Dead() && t.mark(p) == sys.Same })
	if t.onlyOne(all) {
		grow(t.isStray)
	}
	return fresh
}

// numbers says by pid, group and session what belongs to the command. Those numbers stay taken while they have members, so when the command has
// been reaped and its pid is a process again, they are another's.
func (t *tree) numbers(all []sys.Proc) func(sys.Proc) bool {
	t.m.mu.Lock()
	root, reaped, reused := t.command.pid, t.command.reaped, t.command.reused
	t.m.mu.Unlock()
	for _, p := range all {
		reused = reused || reaped && p.PID == root
	}
	if root == 0 || reused {
		return func(sys.Proc) bool { return false }
	}
	return func(p sys.Proc) bool { return p.PID == root || p.Session == root || p.Group == root }
}

func (t *tree) mark(p sys.Proc) sys.Mark {
	mark, known := t.marks[idOf(p)]
	if !known {
		mark = sys.FindEnv(p.PID, ExecIDVariable, t.command.id)
		t.marks[idOf(p)] = mark
	}
	return mark
}

// onlyOne says whether a process that belongs to nobody can only be this command's: no other command ran since it was started, and nobody from
// outside is here.
func (t *tree) onlyOne(all []sys.Proc) bool {
	for _, p := range all {
		if p.Outside() && !p.Bridge(t.m.name) {
			return false
		}
	}
	t.m.mu.Lock()
	defer t.m.mu.Unlock()
	return t.m.isInit && t.command.alone && t.m.starts == t.command.number
}

// isStray says whether an orphan has given up everything by which it could be known (env -i setsid, a hidden environment) and is younger than the
// command. It looks again under children: what is being forked there has no mark yet, and is not ours.
func (t *tree) isStray(p sys.Proc) bool {
	m, c := t.m, t.command
	if p.PPID != 1 || p.Dead() || p.Start < c.since || p.Start == c.since && p.PID < c.pid {
		return false
	}
	if mark := t.mark(p); mark != sys.Absent && mark != sys.Unreadable {
		return false
	}
	m.children.Lock()
	defer m.children.Unlock()
	m.mu.Lock()
	known, started := m.byPID[p.PID] != nil, m.starts != c.number
	m.mu.Unlock()
	now, ok := sys.Read(p.PID)
	return !known && !started && ok && idOf(now) == idOf(p) && now.PPID == 1
}

// byDepth orders processes so that a parent comes before its children.
func byDepth(all []sys.Proc) []sys.Proc {
	parent := make(map[int]int, len(all))
	for _, p := range all {
		parent[p.PID] = p.PPID
	}
	depth := make(map[int]int, len(all))
	for _, p := range all {
		n := 0
		for up, ok := parent[p.PID]; ok && n < len(all); up, ok = parent[up] {
			n++
		}
		depth[p.PID] = n
	}
	sorted := append([]sys.Proc(nil), all...)
	sort.SliceStable(sorted, func(i, j int) bool { return depth[sorted[i].PID] < depth[sorted[j].PID] })
	return sorted
}
