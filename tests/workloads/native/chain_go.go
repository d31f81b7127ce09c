// Two goroutines, each locked to its thread, in known call chains: one calls all the time, the other waits in a system call.
package main

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
)

var stopping atomic.Bool
var sink uint32

//go:noinline
func tiny(x uint32) uint32 { return x*3 + 1 }

//go:noinline
func third(x uint32) uint32 { return tiny(x^3) + x }

//go:noinline
func second(x uint32) uint32 { return third(x) + 2 }

//go:noinline
func first(x uint32) uint32 {
	var sum uint32
	for i := uint32(0); i < 1000; i++ {
		sum += second(x + i)
	}
	return sum
}

//go:noinline
func work() {
	for !stopping.Load() {
		sink += first(sink)
	}
}

//go:noinline
func napInner() int {
	pause := syscall.NsecToTimespec(int64(5 * time.Millisecond))
	if syscall.Nanosleep(&pause, nil) != nil {
		return 1
	}
	return 2
}

//go:noinline
func nap() int {
	count := 0
	for !stopping.Load() {
		count += napInner()
	}
	return count
}

func main() {
	ids := make(chan [2]int, 2)
	done := make(chan bool, 2)
	go func() {
		runtime.LockOSThread()
		ids <- [2]int{0, syscall.Gettid()}
		work()
		done <- true
	}()
	go func() {
		runtime.LockOSThread()
		ids <- [2]int{1, syscall.Gettid()}
		nap()
		done <- true
	}()
	var threads [2]int
	for range threads {
		id := <-ids
		threads[id[0]] = id[1]
	}
	fmt.Printf("ready {\"worker\":%d,\"sleeper\":%d,\"chains\":{"+
		"\"worker\":[[\"main.work\",\"main.first\",\"main.second\",\"main.third\",\"main.tiny\"]],"+
		"\"sleeper\":[[\"main.nap\",\"main.napInner\",\"syscall.Nanosleep\",\"...\"]]}}\n", threads[0], threads[1])
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() && lines.Text() != "stop" {
	}
	stopping.Store(true)
	<-done
	<-done
	fmt.Println("truth {}")
}
