// SPDX-License-Identifier: Apache-2.0
//! Reads `--model_params`: each model has a list of parameters, and others are refused.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::catalog::Error;

/// A parameter of every model; the optimizer reads it.
const LEARNING_RATE: &str = "lr";

/// The parameters of one job, checked against those of its model.
pub(crate) struct ModelParams<'a> {
    model: &'static str,
    given: &'a BTreeMap<String, String>,
}

impl<'a> ModelParams<'a> {
    /// Refuses parameters that are neither in `known` nor the learning rate.
    pub(crate) fn new(
        model: &'static str,
        given: &'a BTreeMap<String, String>,
        known: &[&str],
    ) -> Result<Self, Error> {
        let is_known = |name: &str| name == LEARNING_RATE || known.contains(&name);
        match given.keys().find(|name| !is_known(name)) {
            None => Ok(Self { model, given }),
            Some(name) => {
                let known: Vec<&str> = known.iter().copied().chain([LEARNING_RATE]).collect();
                Err(Error::UnknownParam { model, name: name.clone(), known: known.join(", ") })
            }
        }
    }

    /// The value of `name`, which must fit `needs`; `default` where the job says nothing.
    pub(crate) fn get<T: FromStr>(
        &self,
        name: &'static str,
        default: T,
        needs: &'static str,
        fits: impl Fn(&T) -> bool,
    ) -> Result<T, Error> {
        Ok(self.find(name, needs, fits)?.unwrap_or(default))
    }

    /// The value of `name` if the job gives one.
    pub(crate) fn find<T: FromStr>(
        &self,
        name: &'static str,
        needs: &'static str,
        fits: impl Fn(&T) -> bool,
    ) -> Result<Option<T>, Error> {
        let Some(text) = self.given.get(name) else { return Ok(None) };
        match text.trim().parse() {
            Ok(value) if fits(&value) => Ok(Some(value)),
            Ok(_) | Err(_) => {
                Err(Error::BadParam { model: self.model, name, value: text.clone(), needs })
            }
        }
    }
}
