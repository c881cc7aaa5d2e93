// SPDX-License-Identifier: Apache-2.0

// Command accelerator is a device plugin whose devices do not exist: it lets a node promise
// `nvidia.com/gpu`, so that asking for one is tried without one.
//
//	accelerator FOLDER RESOURCE COUNT
//
// FOLDER holds the kubelet's socket. The containers see their devices' names in ACCELERATORS.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const registerTimeout = 10 * time.Second

// plugin provides devices that are always healthy.
type plugin struct {
	api.UnimplementedDevicePluginServer
	devices []*api.Device
}

func (p plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	if err := stream.Send(&api.ListAndWatchResponse{Devices: p.devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p plugin) Allocate(_ context.Context, asked *api.AllocateRequest) (*api.AllocateResponse, error) {
	answer := &api.AllocateResponse{}
	for _, container := range asked.ContainerRequests {
		names := strings.Join(container.DevicesIds, ",")
		allocated := &api.ContainerAllocateResponse{Envs: map[string]string{"ACCELERATORS": names}}
		answer.ContainerResponses = append(answer.ContainerResponses, allocated)
	}
	return answer, nil
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: accelerator FOLDER RESOURCE COUNT")
	}
	folder, resource := os.Args[1], os.Args[2]
	count, err := strconv.Atoi(os.Args[3])
	check(err)

	lender := plugin{}
	for number := range count {
		device := &api.Device{ID: fmt.Sprintf("device-%d", number), Health: api.Healthy}
		lender.devices = append(lender.devices, device)
	}

	socket := strings.ReplaceAll(resource, "/", "-") + ".sock"
	check(os.RemoveAll(filepath.Join(folder, socket)))
	listener, err := net.Listen("unix", filepath.Join(folder, socket))
	check(err)
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, lender)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()

	check(register(filepath.Join(folder, "kubelet.sock"), socket, resource))
	check(<-served)
}

// register announces the plugin's address to the kubelet.
func register(kubelet, socket, resource string) error {
	insecurely := grpc.WithTransportCredentials(insecure.NewCredentials())
	connection, err := grpc.NewClient("unix://"+kubelet, insecurely)
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), registerTimeout)
	defer cancel()
	_, err = api.NewRegistrationClient(connection).Register(ctx, &api.RegisterRequest{
		Version:      api.Version,
		Endpoint:     socket,
		ResourceName: resource,
		Options:      &api.DevicePluginOptions{},
	})
	return err
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
