package process

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"agentsandbox.dev/init/internal/apierr"
)

func TestAJournalKeepsNumbersOverDroppedFrames(t *testing.T) {
	var j journal
	for _, text := range []string{"a", "b", "c"} {
		j.add(frame{frameStdout, []byte(text)})
	}
	if freed := j.drop(2); freed != 2*(1+frameOverhead) || j.first != 2 || j.next() != 3 {
		t.Fatalf("freed %d, first %d, next %d", freed, j.first, j.next())
	}
	var kinds []byte
	var text string
	next := j.from(0, 100, func(kind byte, seq uint64, data []byte) {
		kinds = append(kinds, kind)
		if kind == frameGap && binary.BigEndian.Uint64(data) != 2 {
			t.Fatalf("the gap ends at %d", binary.BigEndian.Uint64(data))
		}
		text += string(data)
	})
	if next != 3 || !bytes.Equal(kinds, []byte{frameGap, frameStdout}) || !strings.HasSuffix(text, "c") {
		t.Fatalf("next %d, kinds %v", next, kinds)
	}
	if freed := j.drop(99); freed == 0 || j.size != 0 || j.next() != 3 {
		t.Fatalf("size %d, next %d", j.size, j.next())
	}
}

func TestAReaderGetsAtLeastOneFrameHoweverSmallItsLimit(t *testing.T) {
	var j journal
	j.add(frame{frameStdout, make([]byte, 1000)})
	j.add(frame{frameStdout, make([]byte, 1000)})
	if next := j.from(0, 1, func(byte, uint64, []byte) {}); next != 1 {
		t.Fatalf("next %d", next)
	}
}

func TestArgumentsAreShownWithoutBreakingARune(t *testing.T) {
	shown := shorten([]string{strings.Repeat("ü", maxArgvShown)})
	if len(shown[0]) > maxArgvShown || strings.ContainsRune(shown[0], '\uFFFD') || !strings.HasPrefix(strings.Repeat("ü", maxArgvShown), shown[0]) {
		t.Fatalf("got %d bytes", len(shown[0]))
	}
}

func FuzzAStartIsAcceptedWholeOrRefusedAsInvalid(f *testing.F) {
	f.Add([]byte(`{"command":"echo hi"}`))
	f.Add([]byte(`{"argv":["a","b"],"env":{"A":"b"},"cwd":"/","timeout_ms":5,"lease":null,"stdin":true,"pty":{"rows":1,"cols":2}}`))
	f.Add([]byte(`{"argv":["a\u0000"],"env":{"":""}}`))
	workspace := os.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		var s spec
		if json.Unmarshal(data, &s) != nil {
			return
		}
		if err := s.check(workspace); err != nil {
			var invalid *apierr.Error
			if !errors.As(err, &invalid) || invalid.Code != "invalid_request" || invalid.Message == "" {
				t.Fatalf("refused with %v", err)
			}
			return
		}
		if len(s.Argv) == 0 || s.Argv[0] == "" || !strings.HasPrefix(s.Cwd, "/") {
			t.Fatalf("accepted %+v", s)
		}
		for _, entry := range s.environment(nil, workspace, "id") {
			if strings.IndexByte(entry, 0) >= 0 || strings.IndexByte(entry, '=') < 1 {
				t.Fatalf("environment %q", entry)
			}
		}
	})
}

func FuzzFramesAreReadBackAsWritten(f *testing.F) {
	f.Add(byte(1), uint64(7), []byte("data"))
	f.Fuzz(func(t *testing.T, kind byte, seq uint64, data []byte) {
		id := [16]byte{1, 2, 3}
		out := appendFrame([]byte("before"), kind, id, seq, data)[len("before"):]
		if len(out) != frameHeader+len(data) || out[0] != kind || !bytes.Equal(out[1:17], id[:]) {
			t.Fatalf("head %x", out)
		}
		if binary.BigEndian.Uint64(out[17:]) != seq || binary.BigEndian.Uint32(out[25:]) != uint32(len(data)) || !bytes.Equal(out[frameHeader:], data) {
			t.Fatalf("frame %x", out)
		}
	})
}
