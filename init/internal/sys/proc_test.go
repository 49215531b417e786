package sys

import (
	"io"
	"os"
	"strings"
	"testing"
)

func TestAProcessWithAnAwkwardNameIsReadRight(t *testing.T) {
	p, ok := parseStat([]byte("42 (a) b (c)) S 1 42 43 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 2\n"))
	want := Proc{PID: 42, PPID: 1, Group: 42, Session: 43, State: 'S', Start: 98765, Name: "a) b (c)"}
	if !ok || p != want {
		t.Fatalf("got %+v, want %+v", p, want)
	}
}

func TestThisProcessIsFoundAndItsEnvironmentRead(t *testing.T) {
	p, ok := Read(os.Getpid())
	if !ok || p.PPID != os.Getppid() || p.Dead() || p.Stopped() {
		t.Fatalf("got %+v", p)
	}
	if mark := FindEnv(os.Getpid(), "NO_SUCH_VARIABLE", "1"); mark != Absent {
		t.Fatalf("what is not there is %v", mark)
	}
	if mark := FindEnv(os.Getpid(), "PATH", os.Getenv("PATH")); mark != Same {
		t.Fatalf("PATH is %v", mark)
	}
	if mark := FindEnv(os.Getpid(), "PATH", "another"); mark != Other {
		t.Fatalf("another PATH is %v", mark)
	}
}

func TestAMarkIsFoundHoweverTheEnvironmentIsCutIntoReads(t *testing.T) {
	long := strings.Repeat("x", 3*environPart)
	for _, c := range []struct {
		environ string
		want    Mark
	}{
		{"A=1\x00MARK=id\x00", Same},
		{"A=" + long + "\x00MARK=id\x00B=2\x00", Same},
		{"A=" + long + "\x00MARK=id", Same},
		{"A=" + long + "MARK=id\x00", Absent},
		{"MARK=" + long + "\x00", Other},
		{"MARK=other\x00A=" + long + "\x00", Other},
		{"AMARK=id\x00MARKA=id\x00", Absent},
		{"", Absent},
	} {
		for _, size := range []int{1, 7, environPart - 1, environPart, 10 * environPart} {
			got := findEnv(&cutReader{data: c.environ, size: size}, "MARK", "id")
			if got != c.want {
				t.Errorf("%d bytes in reads of %d: got %v, want %v", len(c.environ), size, got, c.want)
			}
		}
	}
}

// cutReader gives at most size bytes a read.
type cutReader struct {
	data string
	size int
}

func (r *cutReader) Read(p []byte) (int, error) {
	if r.data == "" {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), r.size)], r.data)
	r.data = r.data[n:]
	return n, nil
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
