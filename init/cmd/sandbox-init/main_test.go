package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The tests run the real `serve` as PID 1 of a pid namespace of its own, and speak to it over its socket.

const childVariable = "SANDBOX_INIT_TEST_ARGS"

func TestMain(m *testing.M) {
	if what := os.Getenv(helperVariable); what != "" {
		helpers[what]()
		os.Exit(0)
	}
	if args := os.Getenv(childVariable); args != "" {
		if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
			fmt.Fprintln(os.Stderr, "mount /proc:", err)
			os.Exit(1)
		}
		_ = os.Unsetenv(childVariable)
		os.Exit(serve(strings.Split(args, "\n")))
	}
	os.Exit(m.Run())
}

type sandbox struct {
	t         *testing.T
	client    *http.Client
	workspace string
	ids       int
}

func start(t *testing.T) *sandbox {
	t.Helper()
	workspace := t.TempDir()
	socket := fmt.Sprintf("@sandbox-init-test-%d-%s", os.Getpid(), filepath.Base(workspace)+filepath.Base(filepath.Dir(workspace)))
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), childVariable+"="+strings.Join([]string{"--socket=" + socket, "--workspace=" + workspace, "--tmp=" + t.TempDir()}, "\n"), "SECRET_OF_INIT=visible", "KUBERNETES_PORT=1")
	command.Stderr = os.Stderr
	flags := uintptr(syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC)
	command.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		command.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		command.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		command.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	if err := command.Start(); err != nil {
		t.Fatalf("a pid namespace cannot be made: %v", err)
	}
	s := &sandbox{t: t, workspace: workspace}
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}}
	s.client = &http.Client{Transport: transport, Timeout: 30 * time.Second}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		_ = command.Process.Kill()
		_ = command.Wait()
	})
	s.eventually("the socket answers", func() bool {
		answer, err := s.client.Get("http://sandbox/v1/health")
		if err != nil {
			return false
		}
		_ = answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	})
	return s
}

func (s *sandbox) eventually(what string, condition func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if condition() {
			return
		}
	}
	s.t.Fatalf("not within 10 s: %s", what)
}

func (s *sandbox) call(method, target string, body any) (int, map[string]any) {
	s.t.Helper()
	var reader io.Reader
	switch b := body.(type) {
	case nil:
	case []byte:
		reader = bytes.NewReader(b)
	default:
		data, err := json.Marshal(b)
		if err != nil {
			s.t.Fatal(err)
		}
		reader = bytes.NewReader(data)
	}
	request, err := http.NewRequest(method, "http://sandbox/v1"+target, reader)
	if err != nil {
		s.t.Fatal(err)
	}
	answer, err := s.client.Do(request)
	if err != nil {
		s.t.Fatalf("%s %s: %v", method, target, err)
	}
	defer func() { _ = answer.Body.Close() }()
	data, err := io.ReadAll(answer.Body)
	if err != nil {
		s.t.Fatalf("%s %s: %v", method, target, err)
	}
	var decoded map[string]any
	_ = json.Unmarshal(data, &decoded)
	return answer.StatusCode, decoded
}

func (s *sandbox) id() string {
	s.ids++
	return fmt.Sprintf("%032x", s.ids)
}

type fields = map[string]any

// begin starts a command and returns its id.
func (s *sandbox) begin(body fields) string {
	s.t.Helper()
	id := s.id()
	if status, answer := s.call("PUT", "/processes/"+id, body); status != http.StatusCreated {
		s.t.Fatalf("start: %d %v", status, answer)
	}
	return id
}

// ended waits for the exit of a process.
func (s *sandbox) ended(id string) fields {
	s.t.Helper()
	_, view := s.call("GET", "/processes/"+id+"?wait_ms=15000", nil)
	exit, ok := view["exit"].(fields)
	if !ok {
		s.t.Fatalf("process %s has not ended: %v", id, view)
	}
	return exit
}

type frame struct {
	kind byte
	seq  uint64
	data []byte
}

// frames reads what the journal holds.
func (s *sandbox) frames(id string, from uint64) []frame {
	s.t.Helper()
	answer, err := s.client.Get(fmt.Sprintf("http://sandbox/v1/processes/%s/output?from=%d&max_bytes=8388608", id, from))
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	var all []frame
	for {
		_, f, err := readFrame(answer.Body)
		if err == io.EOF {
			return all
		}
		if err != nil {
			s.t.Fatal(err)
		}
		all = append(all, f)
	}
}

func readFrame(r io.Reader) (id string, f frame, err error) {
	var head [29]byte
	if _, err = io.ReadFull(r, head[:]); err != nil {
		return "", f, err
	}
	f.kind, f.seq = head[0], binary.BigEndian.Uint64(head[17:25])
	f.data = make([]byte, binary.BigEndian.Uint32(head[25:29]))
	_, err = io.ReadFull(r, f.data)
	return fmt.Sprintf("%x", head[1:17]), f, err
}

func joined(all []frame, kind byte) string {
	var out strings.Builder
	for _, f := range all {
		if f.kind == kind {
			out.Write(f.data)
		}
	}
	return out.String()
}

// run starts a command, waits for its end and returns exit code, stdout and stderr.
func (s *sandbox) run(body fields) (code int, reason, stdout, stderr string) {
	s.t.Helper()
	id := s.begin(body)
	exit := s.ended(id)
	all := s.frames(id, 0)
	return int(exit["code"].(float64)), exit["reason"].(string), joined(all, 1), joined(all, 2)
}

func TestACommandGivesItsOutputAndItsExitCode(t *testing.T) {
	s := start(t)
	code, reason, stdout, stderr := s.run(fields{"command": "echo out; echo err >&2; exit 3"})
	if code != 3 || reason != "exited" || stdout != "out\n" || stderr != "err\n" {
		t.Fatalf("got %d %s %q %q", code, reason, stdout, stderr)
	}
	_, _, stdout, _ = s.run(fields{"argv": []string{"/bin/sh", "-c", "pwd; echo $HOME; echo $A; echo $SECRET_OF_INIT; echo [$KUBERNETES_PORT]"}, "env": fields{"A": "b c"}})
	if want := s.workspace + "\n" + os.Getenv("HOME") + "\nb c\nvisible\n[]\n"; stdout != want {
		t.Fatalf("got %q, want %q", stdout, want)
	}
}

func TestOutcomesAreKeptApart(t *testing.T) {
	s := start(t)
	script := filepath.Join(s.workspace, "script")
	if err := os.WriteFile(script, []byte("#!/no/such/interpreter\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.workspace, "text"), []byte("just text\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		body   fields
		code   int
		reason string
		stderr string
	}{
		{fields{"argv": []string{"no-such-binary"}}, 127, "start_failed", "no-such-binary"},
		{fields{"argv": []string{"./script"}}, 127, "start_failed", "interpreter"},
		{fields{"argv": []string{"./text"}}, 126, "start_failed", "./text"},
		{fields{"argv": []string{"/etc/passwd"}}, 126, "start_failed", "/etc/passwd"},
		{fields{"argv": []string{"/etc"}}, 126, "start_failed", "directory"},
		{fields{"command": "exit 255"}, 255, "exited", ""},
		{fields{"command": "kill -9 $$"}, 137, "signaled", ""},
		{fields{"command": "kill -TERM $$"}, 143, "signaled", ""},
		{fields{"command": "sleep 60", "timeout_ms": 50}, 137, "timed_out", ""},
		{fields{"command": "trap 'exit 0' TERM; sleep 60", "timeout_ms": 50}, 137, "timed_out", ""},
		{fields{"argv": []string{"true"}, "env": fields{"PATH": "/nowhere"}}, 127, "start_failed", "true"},
	} {
		code, reason, _, stderr := s.run(c.body)
		if code != c.code || reason != c.reason || !strings.Contains(stderr, c.stderr) {
			t.Errorf("%v: got %d %s %q, want %d %s", c.body, code, reason, stderr, c.code, c.reason)
		}
	}
}

func TestBadStartsAreRefusedAndSayWhatToDo(t *testing.T) {
	s := start(t)
	big := strings.Repeat("x", 131072)
	many := map[string]string{}
	for i := range 40 {
		many[fmt.Sprint("V", i)] = strings.Repeat("y", 100_000)
	}
	for name, body := range map[string]fields{
		"nothing":        {},
		"both":           {"command": "true", "argv": []string{"true"}},
		"empty":          {"command": ""},
		"NUL":            {"argv": []string{"a\x00b"}},
		"long argument":  {"argv": []string{"true", big}},
		"kernel's limit": {"argv": []string{"true"}, "env": many},
		"env name":       {"command": "true", "env": fields{"A=B": "c"}},
		"missing cwd":    {"command": "true", "cwd": "/no/such/folder"},
		"cwd is a file":  {"command": "true", "cwd": "/etc/passwd"},
		"bad lease":      {"command": "true", "lease": "short"},
	} {
		status, answer := s.call("PUT", "/processes/"+s.id(), body)
		failure, _ := answer["error"].(fields)
		if status != http.StatusBadRequest || failure["code"] != "invalid_request" || failure["message"] == "" {
			t.Errorf("%s: got %d %v", name, status, answer)
		}
	}
	if status, answer := s.call("GET", "/processes", nil); status != http.StatusOK || len(answer["processes"].([]any)) != 0 {
		t.Errorf("refused starts left something: %v", answer)
	}
}

func TestAStartIsCarriedOutOnce(t *testing.T) {
	s := start(t)
	body := fields{"command": "echo x >> once; sleep 0.2"}
	id := s.id()
	var group sync.WaitGroup
	statuses := make(chan int, 8)
	for range 8 {
		group.Add(1)
		go func() {
			defer group.Done()
			status, _ := s.call("PUT", "/processes/"+id, body)
			statuses <- status
		}()
	}
	group.Wait()
	close(statuses)
	created := 0
	for status := range statuses {
		if status == http.StatusCreated {
			created++
		} else if status != http.StatusOK {
			t.Errorf("got %d", status)
		}
	}
	s.ended(id)
	data, _ := os.ReadFile(filepath.Join(s.workspace, "once"))
	if created != 1 || string(data) != "x\n" {
		t.Fatalf("%d starts created it and it wrote %q", created, data)
	}
	if status, _ := s.call("PUT", "/processes/"+id, fields{"command": "true"}); status != http.StatusConflict {
		t.Fatalf("another body got %d", status)
	}
}

func TestTheResultComesWithTheExitOfTheCommandAndABackgroundChildLivesOn(t *testing.T) {
	s := start(t)
	begun := time.Now()
	code, _, stdout, _ := s.run(fields{"command": "(sleep 1; echo alive > alive; echo late; echo later >&2) & echo started"})
	if code != 0 || stdout != "started\n" || time.Since(begun) > 900*time.Millisecond {
		t.Fatalf("got %d %q after %v", code, stdout, time.Since(begun))
	}
	s.eventually("the child wrote after its parent's exit", func() bool {
		_, err := os.Stat(filepath.Join(s.workspace, "alive"))
		return err == nil
	})
}

func TestATimeoutKillsEverythingThatTheCommandStarted(t *testing.T) {
	s := start(t)
	id := s.begin(fields{"command": "echo before; (setsid sh -c 'sleep 2; echo late > late') & (setsid sh -c 'sleep 3031 & sleep 3032' &) ; sh -c 'trap \"\" TERM; sleep 3033' | cat; wait", "timeout_ms": 500})
	exit := s.ended(id)
	if exit["reason"] != "timed_out" || exit["code"].(float64) == 0 || joined(s.frames(id, 0), 1) != "before\n" {
		t.Fatalf("got %v", exit)
	}
	_, _, stdout, _ := s.run(fields{"command": "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"})
	for _, left := range []string{"sleep 3031", "sleep 3032", "sleep 3033", "sleep 2"} {
		if strings.Contains(stdout, left) {
			t.Errorf("%s is left: %q", left, stdout)
		}
	}
}

func TestNothingEscapesATimeoutWhenItsCommandIsTheOnlyOne(t *testing.T) {
	s := start(t)
	server := s.begin(fields{"command": "setsid sleep 3040 & exit 0"})
	s.ended(server)
	time.Sleep(30 * time.Millisecond) // two clock ticks: what began before is told from what began later
	id := s.begin(fields{"command": "env -i setsid sh -c 'sleep 3041 & exit' & (setsid env -i sleep 3042 &) ; sleep 3043", "timeout_ms": 500})
	s.ended(id)
	_, _, stdout, _ := s.run(fields{"command": "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"})
	for _, left := range []string{"sleep 3041", "sleep 3042", "sleep 3043"} {
		if strings.Contains(stdout, left) {
			t.Errorf("%s is left: %q", left, stdout)
		}
	}
	if !strings.Contains(stdout, "sleep 3040") {
		t.Error("what an earlier command left running was killed too")
	}
}

func TestAForkBombIsKilledWhole(t *testing.T) {
	s := start(t)
	// Bounded by itself, should the kill fail: it stops to multiply after 3 s.
	id := s.begin(fields{"command": "end=$(($(date +%s) + 3)); bomb() { [ $(date +%s) -lt $end ] || exit; [ $(ls /proc | grep -c '^[0-9]') -gt 150 ] || bomb & [ $(ls /proc | grep -c '^[0-9]') -gt 150 ] || bomb & sleep 1; }; bomb; sleep 30"})
	s.eventually("it has multiplied", func() bool {
		_, _, stdout, _ := s.run(fields{"command": "ls /proc | grep -c '^[0-9]'"})
		return len(strings.TrimSpace(stdout)) >= 2 && strings.TrimSpace(stdout) > "30"
	})
	if _, view := s.call("POST", "/processes/"+id+"/kill", fields{}); view["exit"] == nil {
		t.Fatalf("not dead: %v", view)
	}
	_, _, stdout, _ := s.run(fields{"command": "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c " + id})
	if strings.TrimSpace(stdout) != "0" {
		t.Fatalf("%s processes of it are left", strings.TrimSpace(stdout))
	}
}

func TestNoExitCodeIsLostBesideOrphans(t *testing.T) {
	s := start(t)
	var group sync.WaitGroup
	var mu sync.Mutex
	n := 0
	for worker := range 4 {
		group.Add(1)
		go func() {
			defer group.Done()
			for round := range 150 {
				want := (worker*150 + round) % 251
				mu.Lock()
				n++
				id := fmt.Sprintf("%032x", 1<<20+n)
				mu.Unlock()
				_, answer := s.call("PUT", "/processes/"+id+"?wait_ms=1000", fields{"command": fmt.Sprintf("(sleep 0 &); exit %d", want)})
				exit, ok := answer["exit"].(fields)
				if !ok {
					exit = s.ended(id)
				}
				if int(exit["code"].(float64)) != want {
					t.Errorf("got %v, want %d", exit, want)
				}
			}
		}()
	}
	group.Wait()
}

func TestEverySignalFromInsideIsDropped(t *testing.T) {
	s := start(t)
	_, before := s.call("GET", "/health", nil)
	code, _, _, stderr := s.run(fields{"command": "i=1; while [ $i -le 64 ]; do kill -$i 1 2>/dev/null; i=$((i+1)); done; for n in $(seq 200); do kill -TERM 1; done"})
	_, after := s.call("GET", "/health", nil)
	if code != 0 || before["boot_id"] != after["boot_id"] {
		t.Fatalf("got %d %q, %v then %v", code, stderr, before, after)
	}
}

func TestAnAttachedCommandWithoutReadingReaderLosesNothing(t *testing.T) {
	s := start(t)
	lease := strings.Repeat("a", 32)
	id := s.begin(fields{"command": "seq 1 1000000", "lease": lease})
	var out strings.Builder
	next := uint64(0)
	for done := false; !done; {
		for _, f := range s.frames(id, next) {
			if f.seq != next || f.kind == 4 {
				t.Fatalf("frame %d of kind %d, wanted %d", f.seq, f.kind, next)
			}
			next = f.seq + 1
			if f.kind == 1 {
				out.Write(f.data)
			}
			done = done || f.kind == 3
		}
		if status, _ := s.call("POST", "/acks", fields{id: next}); status != http.StatusNoContent {
			t.Fatal("ack refused")
		}
	}
	if out.Len() != 6888896 || !strings.HasSuffix(out.String(), "\n1000000\n") {
		t.Fatalf("got %d bytes", out.Len())
	}
}

func TestABackgroundCommandKeepsItsNewestOutputAndSaysWhatIsGone(t *testing.T) {
	s := start(t)
	id := s.begin(fields{"command": "seq 1 1000000"})
	if exit := s.ended(id); exit["code"].(float64) != 0 {
		t.Fatalf("got %v", exit)
	}
	all := s.frames(id, 0)
	if all[0].kind != 4 || binary.BigEndian.Uint64(all[0].data) != all[1].seq {
		t.Fatalf("no gap at the beginning: %d", all[0].kind)
	}
	if !strings.HasSuffix(joined(all, 1), "\n1000000\n") || all[len(all)-1].kind != 3 {
		t.Fatal("the newest output is not there")
	}
}

func TestALeaseThatNobodyRenewsEndsItsCommands(t *testing.T) {
	s := start(t)
	lease := strings.Repeat("b", 32)
	id := s.begin(fields{"command": "sleep 60", "lease": lease, "lease_ttl_ms": 300})
	other := s.begin(fields{"command": "sleep 60"})
	if status, answer := s.call("POST", "/leases/"+lease+"?ttl_ms=300", nil); status != http.StatusOK || answer["processes"].(float64) != 1 {
		t.Fatalf("got %d %v", status, answer)
	}
	if exit := s.ended(id); exit["reason"] != "canceled" {
		t.Fatalf("got %v", exit)
	}
	if status, _ := s.call("POST", "/leases/"+lease, nil); status != http.StatusNotFound {
		t.Fatalf("a lease without commands got %d", status)
	}
	if _, view := s.call("GET", "/processes/"+other, nil); view["state"] != "running" {
		t.Fatal("a background command ended with somebody's lease")
	}
}

func TestInputArrivesOnceWhateverIsRepeated(t *testing.T) {
	s := start(t)
	id := s.begin(fields{"command": "cat", "stdin": true})
	for _, step := range []struct {
		target string
		body   string
		status int
		offset float64
	}{
		{"?offset=0", "hello ", 200, 6},
		{"?offset=0", "hello ", 200, 6},
		{"?offset=3", "lo world", 200, 11},
		{"?offset=50", "gap", 409, 0},
		{"?offset=11&eof=1", "", 200, 11},
	} {
		status, answer := s.call("PUT", "/processes/"+id+"/stdin"+step.target, []byte(step.body))
		if status != step.status || status == 200 && answer["offset"].(float64) != step.offset {
			t.Fatalf("%s %q: %d %v", step.target, step.body, status, answer)
		}
	}
	s.ended(id)
	if out := joined(s.frames(id, 0), 1); out != "hello world" {
		t.Fatalf("got %q", out)
	}
}

func TestATerminalHasItsSizeAndCanBeResized(t *testing.T) {
	s := start(t)
	id := s.begin(fields{"command": "stty size; read x; stty size; test -t 1 && echo tty", "pty": fields{"rows": 33, "cols": 77}})
	s.eventually("the first size", func() bool { return strings.Contains(joined(s.frames(id, 0), 1), "33 77") })
	if status, _ := s.call("POST", "/processes/"+id+"/resize", fields{"rows": 44, "cols": 99}); status != http.StatusNoContent {
		t.Fatalf("got %d", status)
	}
	s.call("PUT", "/processes/"+id+"/stdin?offset=0", []byte("x\n"))
	s.ended(id)
	if out := joined(s.frames(id, 0), 1); !strings.Contains(out, "44 99") || !strings.Contains(out, "tty") {
		t.Fatalf("got %q", out)
	}
}

func TestAnEventStreamFollowsManyAndIsTakenOver(t *testing.T) {
	s := start(t)
	sid := strings.Repeat("c", 32)
	open := func() *http.Response {
		answer, err := s.client.Get("http://sandbox/v1/streams/" + sid)
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
	first := open()
	ids := map[string]string{}
	for i := range 8 {
		id := s.id()
		_, answer := s.call("PUT", "/processes/"+id+"?stream="+sid, fields{"command": fmt.Sprintf("sleep 0.1; echo %d", i)})
		if answer["subscribed"] != true {
			t.Fatalf("got %v", answer)
		}
		ids[id] = fmt.Sprintf("%d\n", i)
	}
	for left := len(ids); left > 0; {
		id, f, err := readFrame(first.Body)
		if err != nil {
			t.Fatal(err)
		}
		switch f.kind {
		case 1:
			if string(f.data) != ids[id] {
				t.Fatalf("%s got %q", id, f.data)
			}
		case 3:
			left--
		}
	}
	second := open()
	defer func() { _ = second.Body.Close() }()
	if _, _, err := readFrame(first.Body); err == nil {
		t.Fatal("the first connection goes on after the takeover")
	}
	_ = first.Body.Close()
	for id, want := range ids {
		if status, _ := s.call("PUT", "/streams/"+sid+"/processes/"+id+"?from=0", nil); status != http.StatusNoContent {
			t.Fatalf("got %d", status)
		}
		if got, f, err := readFrame(second.Body); err != nil || got != id || string(f.data) != want {
			t.Fatalf("replay of %s: %s %q %v", id, got, f.data, err)
		}
		if _, f, err := readFrame(second.Body); err != nil || f.kind != 3 {
			t.Fatalf("no exit: %v", err)
		}
		break
	}
}

func TestAnArchiveStopsTheSandboxAndLetsItGoOn(t *testing.T) {
	s := start(t)
	id := s.begin(fields{"command": "i=0; while :; do i=$((i+1)); echo $i > a; echo $i > b; done"})
	stopped := s.begin(fields{"command": "kill -STOP $$; echo woken > woken"})
	s.eventually("it writes", func() bool {
		_, err := os.Stat(filepath.Join(s.workspace, "b"))
		return err == nil
	})
	for range 5 {
		request, _ := http.NewRequest("POST", "http://sandbox/v1/archive", strings.NewReader("{}"))
		answer, err := s.client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		if err != nil || answer.StatusCode != http.StatusOK || !bytes.Contains(data, []byte(".sandbox-init/index.json")) {
			t.Fatalf("got %d, %d bytes, %v", answer.StatusCode, len(data), err)
		}
	}
	before, _ := os.ReadFile(filepath.Join(s.workspace, "a"))
	s.eventually("the writer goes on", func() bool {
		now, _ := os.ReadFile(filepath.Join(s.workspace, "a"))
		return !bytes.Equal(before, now)
	})
	if _, err := os.Stat(filepath.Join(s.workspace, "woken")); err == nil {
		t.Fatal("what had stopped itself was woken")
	}
	for _, one := range []string{id, stopped} {
		s.call("POST", "/processes/"+one+"/kill", fields{})
	}
}

func TestWhatIsNotAnIDIsRefused(t *testing.T) {
	s := start(t)
	for _, target := range []string{"/processes/UPPER", "/processes/..%2f", "/processes/" + strings.Repeat("a", 33)} {
		if status, _ := s.call("PUT", target, fields{"command": "true"}); status != http.StatusBadRequest {
			t.Errorf("%s: got %d", target, status)
		}
	}
	status, answer := s.call("GET", "/processes/"+strings.Repeat("d", 32), nil)
	if status != http.StatusNotFound || answer["error"].(fields)["code"] != "no_such_process" {
		t.Errorf("got %d %v", status, answer)
	}
	if status, _ := s.call("GET", "/nothing", nil); status != http.StatusNotFound {
		t.Errorf("got %d", status)
	}
}
