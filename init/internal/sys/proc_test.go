package sys

import (
	"os"
	"testing"
)

func TestAProcessWithAnAwkwardNameIsReadRight(t *testing.T) {
	p, ok := parseStat([]byte("42 (a) b (c)) S 1 42 43 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 2\n"))
	want := Proc{PID: 42, PPID: 1, Group: 42, Session: 43, State: 'S', Start: 98765}
	if !ok || p != want {
		t.Fatalf("got %+v, want %+v", p, want)
	}
}

func TestThisProcessIsFoundAndItsEnvironmentRead(t *testing.T) {
	p, ok := Read(os.Getpid())
	if !ok || p.PPID != os.Getppid() || p.Dead() || p.Stopped() {
		t.Fatalf("got %+v", p)
	}
	if value, ok := Env(os.Getpid(), "NO_SUCH_VARIABLE"); ok {
		t.Fatalf("found what is not there: %q", value)
	}
	if path, ok := Env(os.Getpid(), "PATH"); !ok || path != os.Getenv("PATH") {
		t.Fatalf("PATH is %q", path)
	}
	if now := Ticks(); p.Start > now || now-p.Start > 600*ticksPerSecond {
		t.Fatalf("started at %d, and it is %d", p.Start, now)
	}
}

func FuzzStat(f *testing.F) {
	f.Add([]byte("1 (init) S 0 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 5 1 2"))
	f.Add([]byte("7 ()))(( ) Z 1 7 7"))
	f.Add([]byte(") 1 ("))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, ok := parseStat(data)
		if ok && p.State == 0 {
			t.Fatalf("a process without a state: %+v", p)
		}
		if !ok && p.Start != 0 {
			t.Fatalf("a refused line left %+v", p)
		}
	})
}
