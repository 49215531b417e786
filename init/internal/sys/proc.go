// Package sys reads what the kernel says about processes and limits. It forks nothing and holds at most two files open at a time.
package sys

import (
	"bytes"
	"os"
	"sort"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ticksPerSecond is USER_HZ, the same on every machine that Go runs on.
const ticksPerSecond = 100

// Proc is one line of /proc: who it is and what it does.
type Proc struct {
	PID     int
	PPID    int
	Group   int
	Session int
	State   byte
	Start   uint64 // clock ticks after boot: with PID the identity of a process
}

// Dead says that it only waits to be reaped, or is gone.
func (p Proc) Dead() bool { return p.State == 'Z' || p.State == 'X' || p.State == 'x' }

// Stopped says that it is stopped by a signal or by a tracer.
func (p Proc) Stopped() bool { return p.State == 'T' || p.State == 't' }

// Read reads /proc/PID/stat; ok is false when the process is gone.
func Read(pid int) (p Proc, ok bool) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return p, false
	}
	return parseStat(data)
}

func parseStat(data []byte) (p Proc, ok bool) {
	// The name is in parentheses and may hold anything, also parentheses and spaces.
	open, end := bytes.IndexByte(data, '('), bytes.LastIndexByte(data, ')')
	if open < 1 || end < open {
		return p, false
	}
	pid, err := strconv.Atoi(string(bytes.TrimSpace(data[:open])))
	fields := bytes.Fields(data[end+1:])
	if err != nil || len(fields) < 20 || len(fields[0]) != 1 {
		return p, false
	}
	p.PID, p.State = pid, fields[0][0]
	p.PPID, _ = strconv.Atoi(string(fields[1]))
	p.Group, _ = strconv.Atoi(string(fields[2]))
	p.Session, _ = strconv.Atoi(string(fields[3]))
	p.Start, _ = strconv.ParseUint(string(fields[19]), 10, 64)
	return p, true
}

// Scan lists the processes of this pid namespace by PID, without PID 1 and what was started from outside (its parent is 0).
func Scan() ([]Proc, error) {
	all, err := ScanAll()
	inside := all[:0]
	for _, p := range all {
		if p.PPID != 0 {
			inside = append(inside, p)
		}
	}
	return inside, err
}

// ScanAll lists the processes of this pid namespace by PID, without PID 1.
func ScanAll() ([]Proc, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	names, err := dir.Readdirnames(-1)
	_ = dir.Close()
	if err != nil {
		return nil, err
	}
	var found []Proc
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == 1 {
			continue
		}
		if p, ok := Read(pid); ok {
			found = append(found, p)
		}
	}
	sort.Slice(found, func(i, j int) bool { return found[i].PID < found[j].PID })
	return found, nil
}

// Env is the value of a variable in the environment that a process was started with; ok is false when it has none, or hides its environment.
func Env(pid int, name string) (value string, ok bool) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return "", false
	}
	for _, one := range bytes.Split(data, []byte{0}) {
		if found, ok := strings.CutPrefix(string(one), name+"="); ok {
			return found, true
		}
	}
	return "", false
}

// Ticks is the time since the boot in the unit of Proc.Start.
func Ticks() uint64 {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) != nil {
		return 0
	}
	return uint64(now.Nano()) / (1e9 / ticksPerSecond)
}
