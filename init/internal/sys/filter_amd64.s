#include "textflag.h"

// A signal handler: DI is the signal, SI its siginfo_t, DX the context. si_code is at 8; the kernel's own codes are above 0, and no process can send those.
TEXT ·filter(SB), NOSPLIT|NOFRAME, $0
	MOVL	8(SI), AX
	TESTL	AX, AX
	JLE	drop
	MOVQ	·next(SB), AX
	JMP	AX
drop:
	RET	// to the restorer that the runtime has set

TEXT ·filterPC(SB), NOSPLIT, $0-8
	MOVQ	$·filter(SB), AX
	MOVQ	AX, ret+0(FP)
	RET
