package process

import "encoding/binary"

// journal keeps the frames of one process, numbered from 0. All its methods run under the manager's lock; the data of a frame never changes, so it
// may be used without.
type journal struct {
	frames []frame
	first  uint64 // number of frames[0]
	size   int    // cost of all frames kept

	// What was let go because it had been sent, though it was not acknowledged yet. It still counts against the window of the reader.
	released   int
	releasedTo uint64
}

func (j *journal) next() uint64 { return j.first + uint64(len(j.frames)) }

// window is what the reader has not acknowledged.
func (j *journal) window() int { return j.size + j.released }

func (j *journal) add(f frame) {
	j.frames = append(j.frames, f)
	j.size += f.cost()
}

// drop forgets the frames before number n and returns what that freed.
func (j *journal) drop(n uint64) (freed int) {
	n = min(n, j.next())
	for j.first < n {
		freed += j.frames[0].cost()
		j.frames[0] = frame{}
		j.frames = j.frames[1:]
		j.first++
	}
	if len(j.frames) == 0 {
		j.frames = nil
	}
	j.size -= freed
	return freed
}

// acknowledge forgets what its reader has consumed and returns what that freed.
func (j *journal) acknowledge(n uint64) (freed int) {
	if n >= j.releasedTo {
		j.released = 0
	}
	return j.drop(n)
}

// release forgets the oldest frame, which was sent, and returns what that freed.
func (j *journal) release() (freed int) {
	freed = j.drop(j.first + 1)
	j.released += freed
	j.releasedTo = j.first
	return freed
}

// from visits the frames from number n on, at most limit bytes of payload but always one frame; a gap frame comes first when the oldest are gone.
func (j *journal) from(n uint64, limit int, visit func(kind byte, seq uint64, data []byte)) (next uint64) {
	if n < j.first {
		visit(frameGap, n, binary.BigEndian.AppendUint64(nil, j.first))
		n = j.first
	}
	for n < j.next() {
		f := j.frames[n-j.first]
		visit(f.kind, n, f.data)
		n++
		if limit -= len(f.data); limit <= 0 {
			break
		}
	}
	return n
}
