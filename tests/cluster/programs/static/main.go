// The only file of the test image without a shell: tells who it is, then waits to be stopped.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	fmt.Printf("static uid=%d gid=%d\n", os.Getuid(), os.Getgid())
	if len(os.Args) > 1 && os.Args[1] == "once" {
		return
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	<-stop
}
