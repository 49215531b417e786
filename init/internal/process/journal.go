package process

// journal keeps the frames of one process, numbered from 0. All its methods run under the manager's lock.
type journal struct {
	frames []frame
	first  uint64 // number of frames[0]
	size   int    // cost of all frames kept
}

func (j *journal) next() uint64 { return j.first + uint64(len(j.frames)) }

func (j *journal) add(f frame) {
	j.frames = append(j.frames, f)
	j.size += f.cost()
}

// drop forgets the frames before number n and returns what that freed.
func (j *journal) drop(n uint64) (freed int) {
	if n > j.next() {
		n = j.next()
	}
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

// from copies frames from number n on, at most max bytes of payload but always one frame, with a gap frame first when the oldest are gone.
func (j *journal) from(n uint64, max int, visit func(kind byte, seq uint64, data []byte)) (next uint64) {
	if n < j.first {
		var to [8]byte
		for i := range to {
			to[i] = byte(j.first >> (56 - 8*i))
		}
		visit(frameGap, n, to[:])
		n = j.first
	}
	for n < j.next() {
		f := j.frames[n-j.first]
		visit(f.kind, n, f.data)
		n++
		if max -= len(f.data); max <= 0 {
			break
		}
	}
	return n
}
