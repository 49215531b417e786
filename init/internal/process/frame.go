package process

import "encoding/binary"

// The types of frames (init/API.md, "Event stream and frames").
const (
	frameStdout    = 1
	frameStderr    = 2
	frameExit      = 3
	frameGap       = 4
	frameHeartbeat = 5

	frameHeader   = 1 + 16 + 8 + 4
	maxPayload    = 64 << 10
	frameOverhead = 96 // what a frame costs beside its payload, so that a million one-byte frames are counted as what they are
)

type frame struct {
	kind byte
	data []byte
}

func (f frame) cost() int { return len(f.data) + frameOverhead }

func appendFrame(out []byte, kind byte, id [16]byte, seq uint64, data []byte) []byte {
	out = append(out, kind)
	out = append(out, id[:]...)
	out = binary.BigEndian.AppendUint64(out, seq)
	out = binary.BigEndian.AppendUint32(out, uint32(len(data)))
	return append(out, data...)
}
