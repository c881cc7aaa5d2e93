// SPDX-License-Identifier: Apache-2.0
//! The logs of a job's pods.

use futures::future::BoxFuture;
use futures::io::Lines;
use futures::{AsyncBufRead, AsyncBufReadExt as _, TryStreamExt as _};
use kube::api::LogParams;

use super::{Cluster, Error};

/// The lines of one pod as they arrive.
pub struct LogStream {
    lines: Lines<Box<dyn AsyncBufRead + Send + Unpin>>,
}

impl LogStream {
    /// The next line; none when the pod has ended.
    pub async fn next(&mut self) -> Option<String> {
        // A broken stream has ended.
        self.lines.try_next().await.ok().flatten()
    }
}

impl Cluster {
    /// The log of a pod until now; none while it does not run.
    pub fn log<'a>(&'a self, pod: &'a str) -> BoxFuture<'a, Result<Option<String>, Error>> {
        Box::pin(async move {
            let text = self.pods().logs(pod, &LogParams::default()).await;
            self.if_running(pod, text)
        })
    }

    /// The log of a pod as it grows.
    pub fn follow<'a>(&'a self, pod: &'a str) -> BoxFuture<'a, Result<Option<LogStream>, Error>> {
        Box::pin(async move {
            let params = LogParams { follow: true, ..LogParams::default() };
            let stream = self.pods().log_stream(pod, &params).await;
            Ok(self.if_running(pod, stream)?.map(|stream| {
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
