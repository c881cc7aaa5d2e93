// SPDX-License-Identifier: Apache-2.0

// Command kubernetes is every Kubernetes program in one file: it acts as the program that it was
// called as, by the name of a link. The programs share most of their code, so one file is linked
// once and takes a fifth of the space.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	// Registers the counters of client requests, which the programs serve under /metrics.
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
)

func main() {
	program := filepath.Base(os.Args[0])
	command := command(program)
	if command == nil {
		fmt.Fprintf(os.Stderr, "`%s` is no program of Kubernetes\n", program)
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}

func command(program string) *cobra.Command {
	switch program {
	case "kube-apiserver":
		return apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		return manager.NewControllerManagerCommand()
	case "kube-scheduler":
		return scheduler.NewSchedulerCommand()
	case "kube-proxy":
		return proxy.NewProxyCommand()
	case "kubelet":
		return kubelet.NewKubeletCommand(context.Background())
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand()
	}
	return nil
}
