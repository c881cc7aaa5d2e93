// SPDX-License-Identifier: Apache-2.0

// Command probe is what runs in the containers of the harness's own tests, and what holds the
// namespaces of nodes and pods open. It is static, so that an image needs nothing else.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		fail("usage: probe hold | serve ADDRESS | get URL | lookup NAME | allocate MEBIBYTES")
	}
	argument := ""
	if len(os.Args) > 2 {
		argument = os.Args[2]
	}
	switch verb := os.Args[1]; verb {
	case "hold":
		hold()
	case "serve":
		serve(argument)
	case "get":
		get(argument)
	case "lookup":
		lookup(argument)
	case "allocate":
		allocate(argument)
	default:
		fail("probe cannot `%s`", verb)
	}
}

// hold reaps every orphan of its namespace until it is asked to exit.
func hold() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 || err != nil {
				break
			}
		}
	}
}

// serve answers requests with its host name, and prints when it is asked to exit.
func serve(address string) {
	name, err := os.Hostname()
	check(err)
	go func() {
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, syscall.SIGTERM)
		fmt.Println("leaving by", <-signals)
		os.Exit(0)
	}()
	listener, err := net.Listen("tcp", address)
	check(err)
	fmt.Println("serving as", name)
	check(http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, name)
	})))
}

func get(url string) {
	client := http.Client{Timeout: 3 * time.Second}
	response, err := client.Get(url)
	check(err)
	_, err = io.Copy(os.Stdout, response.Body)
	check(err)
}

func lookup(name string) {
	addresses, err := net.LookupHost(name)
	check(err)
	for _, address := range addresses {
		fmt.Println(address)
	}
}

// allocate takes memory page by page, so that a limit is met where it is set.
func allocate(mebibytes string) {
	wanted, err := strconv.Atoi(mebibytes)
	check(err)
	taken := make([]byte, wanted<<20)
	for page := 0; page < len(taken); page += os.Getpagesize() {
		taken[page] = 1
	}
	fmt.Println("allocated", mebibytes)
	hold()
}

func check(err error) {
	if err != nil {
		fail("%s", err)
	}
}

func fail(format string, values ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", values...)
	os.Exit(1)
}
