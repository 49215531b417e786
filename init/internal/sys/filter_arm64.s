#include "textflag.h"

// A signal handler: R0 is the signal, R1 its siginfo_t, R2 the context. si_code is at 8; the kernel's own codes are above 0, and no process can send those.
TEXT ·filter(SB), NOSPLIT|NOFRAME, $0
	MOVW	8(R1), R9
	CMPW	$0, R9
	BLE	drop
	MOVD	·next(SB), R9
	JMP	(R9)
drop:
	RET	// to the kernel's own sigreturn

TEXT ·filterPC(SB), NOSPLIT, $0-8
	MOVD	$·filter(SB), R9
	MOVD	R9, ret+0(FP)
	RET
