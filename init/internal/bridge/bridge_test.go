package bridge

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

// ends of one bridge: what the engine holds, and what PID 1 holds.
type ends struct {
	stdin, stdout *os.File
	server        *net.UnixConn
	code          chan int
	said          *bytes.Buffer
}

func run(t *testing.T) ends {
	t.Helper()
	name := fmt.Sprintf("@bridge-test-%d-%s", os.Getpid(), t.Name())
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	inRead, inWrite, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	outRead, outWrite, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	e := ends{stdin: inWrite, stdout: outRead, code: make(chan int, 1), said: &bytes.Buffer{}}
	go func() {
		code := Run(name, false, int(inRead.Fd()), int(outWrite.Fd()), e.said)
		_ = inRead.Close()
		_ = outWrite.Close()
		e.code <- code
	}()
	if e.server, err = listener.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = inWrite.Close(); _ = outRead.Close(); _ = e.server.Close() })
	return e
}

func (e ends) ended(t *testing.T, want int) {
	t.Helper()
	select {
	case code := <-e.code:
		if code != want {
			t.Fatalf("it ended with %d: %s", code, e.said)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("it has not ended")
	}
}

func TestBytesGoBothWaysAndTheAnswerComesAfterTheEndOfInput(t *testing.T) {
	e := run(t)
	question := strings.Repeat("question ", 50_000)
	go func() { _, _ = io.WriteString(e.stdin, question); _ = e.stdin.Close() }()
	heard, err := io.ReadAll(e.server)
	if err != nil || string(heard) != question {
		t.Fatalf("heard %d bytes, %v", len(heard), err)
	}
	answer := strings.Repeat("answer ", 50_000)
	go func() { _, _ = io.WriteString(e.server, answer); _ = e.server.Close() }()
	got, err := io.ReadAll(e.stdout)
	if err != nil || string(got) != answer {
		t.Fatalf("got %d bytes, %v", len(got), err)
	}
	e.ended(t, 0)
}

func TestItEndsWhenPID1HangsUp(t *testing.T) {
	e := run(t)
	_ = e.server.Close()
	e.ended(t, 0)
}

func TestItEndsWhenNobodyReadsItsOutputThoughNothingMoves(t *testing.T) {
	e := run(t)
	_ = e.stdout.Close()
	e.ended(t, 0)
}

func TestASlowReaderDoesNotHoldUpTheOtherDirection(t *testing.T) {
	e := run(t)
	go func() { _, _ = e.server.Write(make([]byte, 4<<20)) }()
	if _, err := io.WriteString(e.stdin, "still heard"); err != nil {
		t.Fatal(err)
	}
	heard := make([]byte, len("still heard"))
	if _, err := io.ReadFull(e.server, heard); err != nil || string(heard) != "still heard" {
		t.Fatalf("heard %q, %v", heard, err)
	}
}

func TestLastBytesThatNobodyReadsDoNotKeepIt(t *testing.T) {
	flushTime = 100 * time.Millisecond
	t.Cleanup(func() { flushTime = 10 * time.Second })
	e := run(t)
	go func() { _, _ = e.server.Write(make([]byte, 1<<20)); _ = e.server.Close() }()
	_ = e.stdin.Close()
	e.ended(t, 1)
}

func TestWithoutASocketItSaysSo(t *testing.T) {
	var said bytes.Buffer
	if code := Run(fmt.Sprintf("@nobody-%d", os.Getpid()), false, 0, 1, &said); code != 1 || !strings.Contains(said.String(), "PID 1") {
		t.Fatalf("got %d %q", code, said.String())
	}
}
