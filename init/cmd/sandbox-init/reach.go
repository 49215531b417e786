package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"sync"
	"time"
)

const (
	dialTime    = time.Second
	roundPause  = 300 * time.Millisecond
	quietRounds = 3 // so many in a row without an answer count as closed: rules come a moment after their pod
)

// reach finds out whether TCP addresses can be reached from here: the operator runs it in a pod that must be cut off, and in one that need not be.
// It exits with 0 when it is as expected within the time, else with 1; standard output has one JSON line with the address that answered last.
func reach(args []string) int {
	flags := flag.NewFlagSet("reach", flag.ExitOnError)
	open := flags.Bool("open", false, "expect that an address answers (else that none does)")
	limit := flags.Duration("time", 20*time.Second, "how long to wait for that")
	_ = flags.Parse(args)
	addresses := flags.Args()
	if len(addresses) == 0 {
		addresses = []string{net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))}
	}
	began, last, quiet := time.Now(), "", 0
	for {
		answered := dialAll(addresses)
		if answered != "" {
			last, quiet = answered, 0
		} else {
			quiet++
		}
		if *open && answered != "" || !*open && quiet >= quietRounds {
			return tell(last, 0)
		}
		if time.Since(began) > *limit {
			return tell(last, 1)
		}
		time.Sleep(roundPause)
	}
}

func tell(answered string, code int) int {
	line, _ := json.Marshal(map[string]any{"answered": answered})
	fmt.Println(string(line))
	// The kubelet shows this in the pod's status, so that no log has to be read. Nowhere else is there such a file.
	if log, err := os.OpenFile("/dev/termination-log", os.O_WRONLY|os.O_TRUNC, 0); err == nil {
		_, _ = log.Write(line)
		_ = log.Close()
	}
	return code
}

// dialAll returns one of the addresses that take a connection, empty when none does. A refusal may come from a firewall as well.
func dialAll(addresses []string) string {
	var all sync.WaitGroup
	found := make(chan string, len(addresses))
	for _, address := range addresses {
		all.Add(1)
		go func() {
			defer all.Done()
			connection, err := net.DialTimeout("tcp", address, dialTime)
			if err == nil {
				_ = connection.Close()
				found <- address
			}
		}()
	}
	all.Wait()
	close(found)
	return <-found
}
