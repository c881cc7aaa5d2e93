// SPDX-License-Identifier: Apache-2.0
//! Enums whose values have names: one text for files, JSON and people.

/// Declares enums with the name of each value, which `Display`, `FromStr` and serde use. Messages
/// between processes carry a value as its position in the declaration.
macro_rules! named {
    ($(
        $(#[$meta:meta])*
        $type:ident { $($(#[$variant_meta:meta])* $variant:ident = $name:literal,)* }
    )*) => { $(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $type { $($(#[$variant_meta])* $variant,)* }

        impl $type {
            pub const NAMES: &'static [&'static str] = &[$($name),*];
            pub const ALL: [Self; Self::NAMES.len()] = [$(Self::$variant),*];

            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($name => Ok(Self::$variant),)*
                    _ => Err($crate::text::unknown(text, Self::NAMES)),
                }
            }
        }

        impl From<$type> for i32 {
            fn from(value: $type) -> Self {
                value as Self
            }
        }

        impl TryFrom<i32> for $type {
            type Error = i32;

            fn try_from(number: i32) -> Result<Self, i32> {
                let position = usize::try_from(number).map_err(|_| number)?;
                Self::ALL.get(position).copied().ok_or(number)
            }
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let name = String::deserialize(deserializer)?;
                name.parse().map_err(serde::de::Error::custom)
            }
        }
    )* };
}

pub(crate) use named;
