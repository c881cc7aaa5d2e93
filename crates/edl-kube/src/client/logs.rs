// SPDX-License-Identifier: Apache-2.0
//! The logs of a job's pods.

use futures::future::BoxFuture;
use futures::io::Lines;
use futures::{AsyncBufRead, AsyncBufReadExt as _, TryStreamExt as _};
use kube::api::LogParams;

use super::{Cluster, Error};
use crate::names;

/// The lines of one pod as they arrive.
pub struct LogStream {
    lines: Lines<Box<dyn AsyncBufRead + Send + Unpin>>,
}

/// The log of one process so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    pub process: String,
    pub text: String,
}

impl LogStream {
    /// The next line; none when the pod has ended.
    pub async fn next(&mut self) -> Option<String> {
        // A broken stream has ended.
        self.lines.try_next().await.ok().flatten()
    }
}

impl Cluster {
    /// The log of `process` (`master`, `worker-0`) until now; none while it does not run.
    pub fn log<'a>(
        &'a self,
        job: &'a str,
        process: &'a str,
    ) -> BoxFuture<'a, Result<Option<Log>, Error>> {
        Box::pin(async move {
            let pod = pod_name(job, process);
            let text = self.pods().logs(&pod, &LogParams::default()).await;
            let text = self.if_running(&pod, text)?;
            Ok(text.map(|text| Log { process: process.to_owned(), text }))
        })
    }

    /// The log of `process` as it grows.
    pub fn follow<'a>(
        &'a self,
        job: &'a str,
        process: &'a str,
    ) -> BoxFuture<'a, Result<Option<LogStream>, Error>> {
        Box::pin(async move {
            let pod = pod_name(job, process);
            let params = LogParams { follow: true, ..LogParams::default() };
            let stream = self.pods().log_stream(&pod, &params).await;
            Ok(self.if_running(&pod, stream)?.map(|stream| {
                let stream: Box<dyn AsyncBufRead + Send + Unpin> = Box::new(Box::pin(stream));
                LogStream { lines: stream.lines() }
            }))
        })
    }

    fn if_running<T>(&self, pod: &str, log: kube::Result<T>) -> Result<Option<T>, Error> {
        match log {
            Ok(log) => Ok(Some(log)),
            Err(kube::Error::Api(status)) if matches!(status.code, 400 | 404) => Ok(None),
            Err(error) => Err(self.refused("read the log of", "pod", pod, error)),
        }
    }
}

fn pod_name(job: &str, process: &str) -> String {
    format!("{}-{process}", names::config_map(job))
}
