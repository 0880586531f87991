//! What must outlive a crash: SQL, and the guarded updates that decide every race.
//!
//! Nothing outside this module writes SQL. Nothing in it talks to a node, waits, or decides what should happen next. Each
//! change of a sandbox's state goes through `sandboxes::advance`, which names the state and the generation it moves from.

mod idempotency;
mod keys;
mod operations;
mod rescue;
mod sandbox_reads;
mod sandboxes;
mod templates;
mod writer;

use std::path::Path;
use std::str::FromStr as _;
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, SqliteConnection};

pub use idempotency::{Claim, IdempotencyKey, Seen};
pub use keys::KeyRow;
use operations::NewOperation;
pub use operations::OperationRow;
pub use rescue::Rescue;
pub use sandboxes::{Deletion, Moved, NewSandbox, Observation, Patch, RunWord, SandboxFilter, SandboxRow};
pub use templates::{TagRemoval, TemplateRow};

/// The version of `schema.sql` that this build reads and writes.
const SCHEMA_VERSION: i64 = 1;
const READERS: u32 = 4;

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the store does not work: {0}")]
    Sql(#[from] sqlx::Error),
    #[error("the store does not work: {0}")]
    Commit(String),
    #[error(
        "the store was written by another version (schema {found}, this one knows {SCHEMA_VERSION}); use that version"
    )]
    Version { found: i64 },
    #[error("the store is closed: the server is stopping")]
    Closed,
    #[error("the store holds something that cannot be: {0}")]
    Corrupt(String),
    #[error("a sandbox that is {from} cannot become {to}")]
    IllegalMove { from: space_core::SandboxState, to: space_core::SandboxState },
    #[error("too many metadata keys")]
    MetadataLimit,
    #[error("the name is in use")]
    NameTaken,
    #[error("the template is not there")]
    NoTemplate,
    /// The idempotency key is there already: look again.
    #[error("another request with the same idempotency key was first")]
    KeySeen,
    #[error("{0} sandboxes use the template")]
    InUse(u32),
    #[error("it is the last admin key")]
    LastAdminKey,
}

impl StoreError {
    /// The same failure for another caller of the same commit.
    fn again(&self) -> Self {
        Self::Commit(self.to_string())
    }

    fn is_unique_violation(error: &sqlx::Error) -> bool {
        error.as_database_error().is_some_and(sqlx::error::DatabaseError::is_unique_violation)
    }
}

/// A handle; clones share the connections.
#[derive(Clone)]
pub struct Store {
    readers: SqlitePool,
    writer: writer::Writer,
}

impl Store {
    /// Opens or makes the store in the file `path`.
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        let url = format!("sqlite://{}", path.display());
        let options = SqliteConnectOptions::from_str(&url)
            .unwrap_or_default()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(Duration::from_secs(10))
            .statement_cache_capacity(256)
            .disable_statement_logging();
        protect(path);
        let mut writer = options.connect().await?;
        migrate(&mut writer).await?;
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS)
            .acquire_timeout(Duration::from_secs(10))
            .connect_with(options.create_if_missing(false))
            .await?;
        Ok(Self { readers, writer: writer::Writer::new(writer) })
    }

    /// Whether it answers.
    pub async fn check(&self) -> Result<(), StoreError> {
        sqlx::query("SELECT version FROM schema_version").fetch_one(&self.readers).await?;
        Ok(())
    }
}

/// Environments of sandboxes are in it: for the owner only. SQLite gives its other files the same mode. A file that cannot
/// be made here is reported by opening it.
fn protect(path: &Path) {
    use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
    let made = std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(path);
    if let Ok(file) = made {
        let _ = file.set_permissions(std::fs::Permissions::from_mode(0o600));
    }
}

async fn migrate(conn: &mut SqliteConnection) -> Result<(), StoreError> {
    let mut tx = conn.begin_with("BEGIN IMMEDIATE").await?;
    let there: i64 = sqlx::query_scalar("SELECT count(*) FROM sqlite_master WHERE name = 'schema_version'")
        .fetch_one(&mut *tx)
        .await?;
    if there == 0 {
        tx.execute(include_str!("schema.sql")).await?;
    }
    let found: i64 = sqlx::query_scalar("SELECT version FROM schema_version").fetch_one(&mut *tx).await?;
    if found != SCHEMA_VERSION {
        return Err(StoreError::Version { found });
    }
    tx.commit().await?;
    Ok(())
}

/// Numbers of the store that the schema keeps in range; a negative one reads as 0.
fn unsigned<T: TryFrom<i64> + Default>(value: i64) -> T {
    T::try_from(value).unwrap_or_default()
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
