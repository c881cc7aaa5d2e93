// SPDX-License-Identifier: Apache-2.0
//! What is on its way between two processes, as scripts see it.

use edl_core::id::BatchId;
use edl_core::platform::{InstanceId, Order};
use edl_net::proto::{
    PsCommand, PsMessage, WorkerCommand, WorkerMessage, ps_command, ps_message, worker_command,
    worker_message,
};
use prost::Message as _;

use crate::frames::{self, Content};
use crate::mesh;
use crate::message::Message;
use crate::network::Purpose;

/// Something on its way between two processes.
#[derive(Clone, Debug)]
pub struct Sent {
    pub from: InstanceId,
    pub to: InstanceId,
    pub what: What,
}

#[derive(Clone, Debug)]
pub enum What {
    FromWorker(worker_message::Kind),
    ToWorker(worker_command::Kind),
    FromServer(ps_message::Kind),
    ToServer(ps_command::Kind),
    /// The gradients of a batch, for a server.
    Push(BatchId),
    Acknowledgement,
    /// Everything else between a worker and a server.
    Data,
    /// The gradients of the step with this number, for another member.
    Gradients(u64),
    /// Everything else between two members.
    Mesh,
    /// An order to the platform, about the receiver.
    Order(Order),
    /// The receiver notices that a connection is gone.
    Broken,
}

impl What {
    pub(super) fn of(purpose: Purpose, to: InstanceId, message: &Message) -> Self {
        match message {
            Message::Control(bytes) => control(purpose, to, bytes).expect("it can be decoded"),
            Message::Close(_) => Self::Broken,
            Message::Frame(bytes) => match frames::decode(bytes) {
                (label, Content::Push(..)) => Self::Push(label.batch),
                (_, Content::Ack(_)) => Self::Acknowledgement,
                (
                    _,
                    Content::Hello
                    | Content::Accepted
                    | Content::Pull(_)
                    | Content::Piece(..)
                    | Content::Refused(..),
                ) => Self::Data,
            },
            Message::Mesh(mesh::MeshMessage { content: mesh::Content::Nodes(step, _), .. }) => {
                Self::Gradients(*step)
            }
            Message::Mesh(_) => Self::Mesh,
        }
    }
}

fn control(purpose: Purpose, to: InstanceId, bytes: &[u8]) -> Option<What> {
    let is_to_master = to == InstanceId::MASTER;
    let what = match (purpose == Purpose::Worker, is_to_master) {
        (true, true) => What::FromWorker(WorkerMessage::decode(bytes).ok()?.kind?),
        (true, false) => What::ToWorker(WorkerCommand::decode(bytes).ok()?.kind?),
        (false, true) => What::FromServer(PsMessage::decode(bytes).ok()?.kind?),
        (false, false) => What::ToServer(PsCommand::decode(bytes).ok()?.kind?),
    };
    Some(what)
}
