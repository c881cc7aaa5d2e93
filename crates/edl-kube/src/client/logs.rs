// SPDX-License-Identifier: Apache-2.0
//! What a job's pods wrote.

use futures::future::BoxFuture;
use futures::io::Lines;
use futures::{AsyncBufRead, AsyncBufReadExt as _, TryStreamExt as _};
use kube::api::LogParams;

use super::{Cluster, Error};
use crate::names;

/// The lines of one pod, whole or as they come.
pub struct LogStream {
    lines: Lines<Box<dyn AsyncBufRead + Send + Unpin>>,
}

/// What one process has written so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    pub process: String,
    pub text: String,
}

impl LogStream {
    /// The next line; none when the pod has ended.
    pub async fn next(&mut self) -> Option<String> {
        // A stream that breaks has said what it had to say.
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
            let pod = format!("{}-{process}", names::config_map(job));
            match self.pods().logs(&pod, &LogParams::default()).await {
                Ok(text) => Ok(Some(Log { process: process.to_owned(), text })),
                Err(kube::Error::Api(status)) if matches!(status.code, 400 | 404) => Ok(None),
                Err(error) => Err(self.refused("read the log of", "pod", &pod, error)),
            }
        })
    }

    /// The log of `process` as it grows.
    pub fn follow<'a>(
        &'a self,
        job: &'a str,
        process: &'a str,
    ) -> BoxFuture<'a, Result<Option<LogStream>, Error>> {
        Box::pin(async move {
            let pod = format!("{}-{process}", names::config_map(job));
            let params = LogParams { follow: true, ..LogParams::default() };
            match self.pods().log_stream(&pod, &params).await {
                Ok(stream) => {
                    let stream: Box<dyn AsyncBufRead + Send + Unpin> = Box::new(Box::pin(stream));
                    Ok(Some(LogStream { lines: stream.lines() }))
                }
                Err(kube::Error::Api(status)) if matches!(status.code, 400 | 404) => Ok(None),
                Err(error) => Err(self.refused("read the log of", "pod", &pod, error)),
            }
        })
    }
}
