//! Idempotency keys. The row of a mutation is written in the mutation's own transaction; a request that leaves nothing in
//! the store (a signal, a new folder) claims its key first and puts its answer there afterwards.
//!
//! Only hashes of keys and requests are kept.

use sqlx::{Row as _, SqliteConnection};

use super::{Store, StoreError, unsigned};
use crate::secrets::sha256;

/// A key as sent, hashed, and the request it was sent with, hashed.
#[derive(Clone)]
pub struct IdempotencyKey {
    pub project: String,
    pub key_hash: String,
    pub request_hash: String,
}

impl IdempotencyKey {
    /// `request` is what must be the same: method, path and body in one canonical text.
    pub fn new(project: &str, key: &str, request: &[u8]) -> Self {
        Self { project: project.to_owned(), key_hash: sha256(key.as_bytes()), request_hash: sha256(request) }
    }
}

/// What is known of a key.
#[derive(Debug, Clone)]
pub struct Seen {
    pub same_request: bool,
    pub resource: Option<String>,
    pub answer: Option<(u16, String)>,
}

/// Whether a request may go on.
pub enum Claim {
    Mine,
    Seen(Seen),
}

/// Part of a mutation's transaction. `KeySeen` when the key is there, whatever for.
pub(super) async fn insert(
    conn: &mut SqliteConnection,
    key: &IdempotencyKey,
    resource: Option<&str>,
    now_ms: i64,
) -> Result<(), StoreError> {
    let done = sqlx::query(
        "INSERT INTO idempotency (project, key_hash, request_hash, resource, created_at_ms) VALUES ($1, $2, $3, $4, $5)",
    )
    .bind(&key.project)
    .bind(&key.key_hash)
    .bind(&key.request_hash)
    .bind(resource)
    .bind(now_ms)
    .execute(conn)
    .await;
    match done {
        Err(e) if StoreError::is_unique_violation(&e) => Err(StoreError::KeySeen),
        other => other.map(|_| ()).map_err(StoreError::from),
    }
}

impl Store {
    pub async fn seen_key(&self, key: &IdempotencyKey) -> Result<Option<Seen>, StoreError> {
        let row = sqlx::query(
            "SELECT request_hash, resource, status, body FROM idempotency WHERE project = $1 AND key_hash = $2",
        )
        .bind(&key.project)
        .bind(&key.key_hash)
        .fetch_optional(&self.readers)
        .await?;
        let Some(row) = row else { return Ok(None) };
        let status: Option<i64> = row.try_get("status")?;
        let body: Option<String> = row.try_get("body")?;
        Ok(Some(Seen {
            same_request: row.try_get::<&str, _>("request_hash")? == key.request_hash,
            resource: row.try_get("resource")?,
            answer: status.map(|s| (unsigned(s), body.unwrap_or_default())),
        }))
    }

    /// Remembers what a key made, outside of another mutation.
    pub async fn insert_key_row(&self, key: IdempotencyKey, resource: String, now_ms: i64) -> Result<(), StoreError> {
        self.writer.write(move |c| Box::pin(async move { insert(c, &key, Some(&resource), now_ms).await })).await
    }

    /// Takes the key for `owner` until `until_ms`. A claim that was never answered and has run out may be taken again:
    /// whoever held it is dead.
    pub async fn claim_key(
        &self,
        key: IdempotencyKey,
        owner: String,
        now_ms: i64,
        until_ms: i64,
    ) -> Result<Claim, StoreError> {
        let again = key.clone();
        let mine = self
            .writer
            .write(move |c| {
                Box::pin(async move {
                    let done = sqlx::query(
                        "INSERT INTO idempotency (project, key_hash, request_hash, owner, lease_until_ms, created_at_ms) \
                         VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (project, key_hash) DO UPDATE SET \
                         owner = excluded.owner, lease_until_ms = excluded.lease_until_ms \
                         WHERE idempotency.status IS NULL AND idempotency.resource IS NULL \
                         AND idempotency.lease_until_ms < $6 AND idempotency.request_hash = excluded.request_hash",
                    )
                    .bind(&key.project)
                    .bind(&key.key_hash)
                    .bind(&key.request_hash)
                    .bind(owner)
                    .bind(until_ms)
                    .bind(now_ms)
                    .execute(c)
                    .await?;
                    Ok(done.rows_affected() == 1)
                })
            })
            .await?;
        if mine {
            return Ok(Claim::Mine);
        }
        // Only gone again when it was given back in between.
        let nothing = Seen { same_request: true, resource: None, answer: None };
        Ok(Claim::Seen(self.seen_key(&again).await?.unwrap_or(nothing)))
    }

    /// Puts the answer under a claimed key; `None` gives the key back, so that a retry is a new try.
    pub async fn answer_key(
        &self,
        key: IdempotencyKey,
        owner: String,
        answer: Option<(u16, String)>,
    ) -> Result<(), StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let query = match answer {
                        Some((status, body)) => sqlx::query(
                            "UPDATE idempotency SET lease_until_ms = NULL, status = $4, body = $5 \
                             WHERE project = $1 AND key_hash = $2 AND owner = $3",
                        )
                        .bind(key.project)
                        .bind(key.key_hash)
                        .bind(owner)
                        .bind(i64::from(status))
                        .bind(body),
                        None => {
                            sqlx::query("DELETE FROM idempotency WHERE project = $1 AND key_hash = $2 AND owner = $3")
                                .bind(key.project)
                                .bind(key.key_hash)
                                .bind(owner)
                        }
                    };
                    query.execute(c).await?;
                    Ok(())
                })
            })
            .await
    }
}
