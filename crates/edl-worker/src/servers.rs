// SPDX-License-Identifier: Apache-2.0
//! The parameter servers as the worker sees them: the edge that tests replace.

use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use edl_core::id::{BatchId, RunId};
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;
use edl_net::data::{Acked, Limits, PsClient, Route, Versions};
use edl_net::handshake::Encryption;
use edl_net::key::JobKey;
use edl_tensor::model::Gradient;
use edl_tensor::push::Lane;

use crate::chain;

/// A connection to a server must be established within this time.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);
/// A frame must not stop in the middle for longer than this.
const FRAME_LIMIT: Duration = Duration::from_secs(10);

/// Connections to all servers of one route.
pub(crate) trait Servers: Send {
    /// Fills in what `pull` asks for.
    fn pull(&mut self, pull: &mut Pull) -> Result<Versions, Error>;

    /// Sends a gradient to every server and does not wait for the answers.
    fn push(&mut self, push: &Push) -> Result<(), Error>;

    /// Tells the servers that a batch has no gradient.
    fn skip(&mut self, batch: BatchId) -> Result<(), Error>;

    /// The next batch that all servers acknowledged, if there is one within `limit`.
    fn acknowledged(&mut self, limit: Duration) -> Result<Option<Acked>, Error>;
}

/// Which parameters to fetch, and the buffers that they come back in.
#[derive(Debug, Default)]
pub(crate) struct Pull {
    /// Per table, no id twice.
    pub(crate) ids: Vec<Vec<u64>>,
    /// As long as the model's dense parameters, if they are wanted.
    pub(crate) dense: Option<Vec<f32>>,
    pub(crate) rows: Vec<Vec<f32>>,
    /// Whether a push will follow, for which the servers may keep others waiting.
    pub(crate) will_push: bool,
    /// Rounds that must have been applied.
    pub(crate) min_round: Option<u64>,
    /// The rows alone are wanted, as they are after this many steps.
    pub(crate) step: Option<u64>,
}

/// The gradient of one batch, with no id twice.
#[derive(Debug)]
pub(crate) struct Push {
    pub(crate) batch: BatchId,
    pub(crate) n_records: u32,
    pub(crate) base: Versions,
    pub(crate) gradient: Gradient,
    /// The ids of the gradient's rows, per table.
    pub(crate) ids: Vec<Vec<u64>>,
    /// Set for rows alone, of one lane of a step.
    pub(crate) lane: Option<Lane>,
}

/// Makes connections.
pub(crate) trait Dial: Send {
    fn dial(&mut self, route: &Route) -> Result<Line, Error>;
}

/// Open connections, and the means to end every wait on them at once.
pub(crate) struct Line {
    pub(crate) servers: Box<dyn Servers>,
    pub(crate) abort: Abort,
}

pub(crate) type Abort = Box<dyn Fn() + Send>;

/// Why the servers cannot be used now. What to do about it is the same for every cause: connect
/// again, or wait for a new route.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{0}")]
    Lost(String),
    /// They are at a different step than the worker: only loading both can fix that.
    #[error("{0}")]
    StepMismatch(String),
}

/// Dials the real servers of one job.
pub(crate) struct PsDial {
    pub(crate) key: JobKey,
    pub(crate) run: RunId,
    pub(crate) encryption: Encryption,
    /// Uses TCP even where a server has a Unix socket on this machine.
    pub(crate) is_tcp: bool,
    pub(crate) layout: Layout,
    pub(crate) model: ModelSpec,
    /// How long parameters or an answer may take, rounds of other workers included.
    pub(crate) patience: Duration,
    /// Whether the servers bound staleness.
    pub(crate) is_bounded: bool,
}

impl Dial for PsDial {
    fn dial(&mut self, route: &Route) -> Result<Line, Error> {
        let limits = Limits {
            connect: CONNECT_LIMIT,
            frame: FRAME_LIMIT,
            pull: self.patience,
            ack: self.patience,
        };
        let mut route = route.clone();
        if self.is_tcp {
            route.servers.iter_mut().for_each(|server| server.unix_path.clear());
        }
        let session = (&self.key, self.run, self.encryption);
        let mut client = PsClient::connect(&route, session, self.layout, &self.model, limits)?;
        if self.is_bounded {
            client.pull_in_order();
        }
        let handle = client.abort_handle();
        Ok(Line { servers: Box::new(client), abort: Box::new(move || handle.abort()) })
    }
}

impl Servers for PsClient {
    fn pull(&mut self, pull: &mut Pull) -> Result<Versions, Error> {
        let Pull { ids, dense, rows, will_push, min_round, step } = pull;
        let dense = dense.as_deref_mut();
        let pulled = if let Some(step) = step {
            self.read_at(*step, ids, rows)
        } else if *will_push {
            self.pull(ids, dense, rows, *min_round)
        } else {
            self.read(ids, dense, rows)
        };
        Ok(pulled?)
    }

    fn push(&mut self, push: &Push) -> Result<(), Error> {
        let Push { batch, n_records, base, gradient, ids, lane } = push;
        if let Some(lane) = lane {
            return Ok(self.push_lane(*batch, *lane, *n_records, ids, &gradient.rows)?);
        }
        Ok(self.push(*batch, *n_records, base, &gradient.dense, ids, &gradient.rows)?)
    }

    fn skip(&mut self, batch: BatchId) -> Result<(), Error> {
        Ok(self.skip(batch)?)
    }

    fn acknowledged(&mut self, limit: Duration) -> Result<Option<Acked>, Error> {
        match self.acks().recv_timeout(limit) {
            Ok(acked) => Ok(Some(acked?)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Error::Lost("the connection was closed".into()))
            }
        }
    }
}

impl From<edl_net::data::Error> for Error {
    fn from(error: edl_net::data::Error) -> Self {
        let is_mismatch = matches!(error, edl_net::data::Error::StepMismatch(_));
        let text = chain(&error);
        if is_mismatch { Self::StepMismatch(text) } else { Self::Lost(text) }
    }
}
